/* Storage types of weights, and their values as vectors of float.
 *
 * A row is a sequence of parts of 32 numbers. A packed number is q * factor + offset, rounded once, with an integer q:
 * part_scales() widens the factors and offsets of some parts, decode() gives VL numbers of a part, starting with number
 * VL * piece. Layouts: GGML's block structures (ggml-common.h). */
#ifndef JF_FORMATS_H
#define JF_FORMATS_H

#include <stddef.h>

#include "simd.h"

/* The numbers are those of jackfield_native/library.py. */
enum { F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, TYPES };

#define PART 32
#define PIECES (PART / VL)
#define SPAN 64 /* parts whose scales are widened at once */

/* Factor and offset of a part. Q6_K has two factors, one for each half, and offsets of -32 times them. */
typedef struct {
    float factor, offset;
} scale;

INLINE const uint8_t *block_of(int type, const uint8_t *row, long part) {
    switch (type) {
    case Q4_0: return row + part * 18;
    case Q4_1: return row + part * 20;
    case Q5_0: return row + part * 22;
    case Q5_1: return row + part * 24;
    case Q8_0: return row + part * 34;
    case Q4_K: return row + part / 8 * 144;
    case Q5_K: return row + part / 8 * 176;
    default: return row + part / 8 * 210;
    }
}

INLINE scale two_halves(const uint8_t *p) {
    scale s;
#if defined(JF_X86)
    int32_t both;
    memcpy(&both, p, 4);
    __m128 wide = _mm_cvtph_ps(_mm_cvtsi32_si128(both));
    _mm_storel_pi((__m64 *)&s, wide);
#else
    s.factor = half_at(p);
    s.offset = half_at(p + 2);
#endif
    return s;
}

/* Six-bit factor and minimum of the eight parts of a Q4_K or Q5_K block, packed in 12 bytes. */
INLINE scale k_scale(const uint8_t *block, long part) {
    const uint8_t *packed = block + 4;
    int factor, least;
    if (part < 4) {
        factor = packed[part] & 63;
        least = packed[part + 4] & 63;
    } else {
        factor = (packed[part + 4] & 15) | (packed[part - 4] >> 6 << 4);
        least = (packed[part + 4] >> 4) | (packed[part] >> 6 << 4);
    }
    scale both = two_halves(block);
    return (scale){both.factor * factor, -(both.offset * least)};
}

INLINE scale part_scale(int type, const uint8_t *row, long part) {
    const uint8_t *block = block_of(type, row, part);
    float factor;
    switch (type) {
    case Q4_0: factor = half_at(block); return (scale){factor, -8 * factor};
    case Q5_0: factor = half_at(block); return (scale){factor, -16 * factor};
    case Q8_0: return (scale){half_at(block), 0};
    case Q4_1:
    case Q5_1: return two_halves(block);
    case Q4_K:
    case Q5_K: return k_scale(block, part % 8);
    default: break;
    }
    const int8_t *six = (const int8_t *)block + 192 + part % 8 / 4 * 8 + part % 4 * 2;
    factor = half_at(block + 208);
    return (scale){factor * six[0], factor * six[1]};
}

INLINE void part_scales(int type, const uint8_t *row, long first, long count, scale *out) {
    for (long i = 0; i < count; i++) out[i] = part_scale(type, row, first + i);
}

/* Numbers of which the low four bits of q are the index. */
INLINE vf four_bits(vi q, const scale *s) {
#if VL == 16
    const vf numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)q, (__m512)(numbers * s->factor + s->offset));
#else
    return vf_of(q & 15) * s->factor + s->offset;
#endif
}

/* Sixteen bytes hold the low halves of numbers 0 to 15 and the high halves of 16 to 31. */
INLINE vi nibbles_at(const uint8_t *nibbles, int piece) {
    int at = piece * VL;
    return at < 16 ? vi_u8(nibbles + at) : vi_u8(nibbles + at - 16) >> 4;
}

INLINE vf five_bits(const uint8_t *high, const uint8_t *nibbles, int piece, const scale *s) {
    typedef uint32_t vu __attribute__((vector_size(VL * 4)));
    uint32_t bits;
    vu places;
    memcpy(&bits, high, 4);
    for (int i = 0; i < VL; i++) places[i] = (uint32_t)(i + piece * VL);
    vi fifth = (vi)((((vu){0} + bits) >> places) & 1) << 4;
    return vf_of((nibbles_at(nibbles, piece) & 15) | fifth) * s->factor + s->offset;
}

INLINE vf six_bits(const uint8_t *block, long part, int piece, const scale *s) {
    int at = piece * VL;
    const uint8_t *low = block + part / 4 * 64 + part % 2 * 32 + at, *high = block + 128 + part / 4 * 32 + at;
    vi q = ((vi_u8(low) >> (int)(part % 4 / 2 * 4)) & 15) | ((vi_u8(high) >> (int)(part % 4 * 2)) & 3) << 4;
    return vf_of(q - 32) * (at < 16 ? s->factor : s->offset);
}

INLINE vf decode(int type, const uint8_t *row, long part, int piece, const scale *s) {
    long at = part * PART + piece * VL;
    if (type == F32) return vf_load((const float *)row + at);
    if (type == BF16) return vf_bf16(row + 2 * at);
    if (type == F16) return vf_half(row + 2 * at);
    const uint8_t *block = block_of(type, row, part);
    int nibble = (int)(part % 2 * 4), place = (int)(part % 8);
    switch (type) {
    case Q4_0: return four_bits(nibbles_at(block + 2, piece), s);
    case Q4_1: return four_bits(nibbles_at(block + 4, piece), s);
    case Q5_0: return five_bits(block + 2, block + 6, piece, s);
    case Q5_1: return five_bits(block + 4, block + 8, piece, s);
    case Q8_0: return vf_of(vi_i8(block + 2 + piece * VL)) * s->factor;
    case Q4_K: return four_bits(vi_u8(block + 16 + place / 2 * 32 + piece * VL) >> nibble, s);
    case Q5_K: {
        vi fifth = ((vi_u8(block + 16 + piece * VL) >> place) & 1) << 4;
        vi low = (vi_u8(block + 48 + place / 2 * 32 + piece * VL) >> nibble) & 15;
        return vf_of(low | fifth) * s->factor + s->offset;
    }
    default: return six_bits(block, place, piece, s);
    }
}

/* One number past the last whole part: only the types that are not packed have such. */
INLINE float decode_one(int type, const uint8_t *row, long at) {
    if (type == BF16) return bf16_at(row + 2 * at);
    if (type == F16) return half_at(row + 2 * at);
    float value;
    memcpy(&value, row + 4 * at, 4);
    return value;
}

#endif
