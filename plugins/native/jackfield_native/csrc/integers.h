/* Packed numbers as integers, and rows rounded to 16 bits: products of both are summed exactly inside a part.
 *
 * A row x is cut into parts of 32; those of one part are unit * a with a between -32767 and 32767, so that each is off by
 * less than 1/65534 of the part's largest. Four to eight bits of weight times these make sums below 2^31. Where there is
 * no instruction that multiplies and adds pairs of 16 bits, or registers take packed numbers apart faster, rows stay as
 * they are. */
#ifndef JF_INTEGERS_H
#define JF_INTEGERS_H

#include "formats.h"

/* [rows, parts] each: numbers in parts of 32; what one of them stands for, and what their sum does. Q6_K, which has no
 * offset and a factor for each half, has the former twice. */
typedef struct {
    int16_t *numbers;
    scale *units;
} rounded;

#if VL == 8
#define JF_INTEGERS 1
#define INTEGER_ROWS 4

/* Numbers 0 to 15 and 16 to 31 of a part. */
typedef struct {
    __m256i first, second;
} codes;

INLINE __m256i wide_u8(const uint8_t *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE __m256i wide_i8(const uint8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }

INLINE codes codes_at(const int16_t *p) {
    return (codes){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 16))};
}

INLINE codes nibbles(const uint8_t *p) {
    __m256i bytes = wide_u8(p);
    return (codes){_mm256_and_si256(bytes, _mm256_set1_epi16(15)), _mm256_srli_epi16(bytes, 4)};
}

/* Bit i of 16 becomes 16 in lane i. */
INLINE __m256i fifth_of(int bits) {
    const __m256i places = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((int16_t)bits), places), places);
    return _mm256_and_si256(set, _mm256_set1_epi16(16));
}

INLINE codes five(const uint8_t *high, const uint8_t *low) {
    uint32_t bits;
    memcpy(&bits, high, 4);
    codes q = nibbles(low);
    return (codes){_mm256_or_si256(q.first, fifth_of((int)(bits & 0xffff))),
                   _mm256_or_si256(q.second, fifth_of((int)(bits >> 16)))};
}

/* `bits` bits of each byte from `at` on. */
INLINE __m256i field(const uint8_t *p, int at, int bits) {
    return _mm256_and_si256(_mm256_srl_epi16(wide_u8(p), _mm_cvtsi32_si128(at)), _mm256_set1_epi16((int16_t)((1 << bits) - 1)));
}

INLINE __m256i five_k(const uint8_t *block, int place, int at) {
    __m256i low = field(block + 48 + place / 2 * 32 + at, place % 2 * 4, 4);
    return _mm256_or_si256(low, _mm256_slli_epi16(field(block + 16 + at, place, 1), 4));
}

INLINE __m256i six_k(const uint8_t *block, int place, int at) {
    __m256i low = field(block + place / 4 * 64 + place % 2 * 32 + at, place % 4 / 2 * 4, 4);
    __m256i high = field(block + 128 + place / 4 * 32 + at, place % 4 * 2, 2);
    return _mm256_sub_epi16(_mm256_or_si256(low, _mm256_slli_epi16(high, 4)), _mm256_set1_epi16(32));
}

/* The integers q of formats.h; those of Q6_K less 32, since its halves have factors and no offset. */
INLINE codes codes_of(int type, const uint8_t *row, long part) {
    const uint8_t *block = block_of(type, row, part);
    int place = (int)(part % 8);
    switch (type) {
    case Q4_0: return nibbles(block + 2);
    case Q4_1: return nibbles(block + 4);
    case Q5_0: return five(block + 2, block + 6);
    case Q5_1: return five(block + 4, block + 8);
    case Q8_0: return (codes){wide_i8(block + 2), wide_i8(block + 18)};
    case Q4_K: {
        const uint8_t *from = block + 16 + place / 2 * 32;
        return (codes){field(from, place % 2 * 4, 4), field(from + 16, place % 2 * 4, 4)};
    }
    case Q5_K: return (codes){five_k(block, place, 0), five_k(block, place, 16)};
    default: return (codes){six_k(block, place, 0), six_k(block, place, 16)};
    }
}

/* Eight sums of two products each. */
INLINE vf pairs_of(__m256i w, __m256i x) { return (vf)_mm256_cvtepi32_ps(_mm256_madd_epi16(w, x)); }

/* Eight sums of four products each. */
INLINE vf sums_of(codes w, codes x) {
    __m256i both = _mm256_add_epi32(_mm256_madd_epi16(w.first, x.first), _mm256_madd_epi16(w.second, x.second));
    return (vf)_mm256_cvtepi32_ps(both);
}

/* Write what factors and offsets make of units and sums, and return `rest` with these products added: in it, odd lanes
 * sum up what offsets add. */
INLINE vf scaled(const scale *scales, const scale *units, long count, scale *out, vf rest) {
    long i = 0;
    for (; i + VL / 2 <= count; i += VL / 2) {
        vf both = vf_load((const float *)(scales + i)) * vf_load((const float *)(units + i));
        vf_store((float *)(out + i), both);
        rest += both;
    }
    for (; i < count; i++) {
        out[i] = (scale){scales[i].factor * units[i].factor, scales[i].offset * units[i].offset};
        rest[1] += out[i].offset;
    }
    return rest;
}

INLINE float offsets_of(vf rest) { return (rest[1] + rest[3]) + (rest[5] + rest[7]); }

#define LEAST 1e-30f /* parts with no larger numbers are zeros */

INLINE scale round_part(const float *x, int16_t *numbers) {
    float largest = 0, none = 0;
    for (int i = 0; i < PART; i++) {
        float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
        none += x[i] * 0; /* not a number where one of them is none, or infinite */
    }
    float up = largest > LEAST ? 32767 / largest : 0;
    int sum = 0;
    for (int i = 0; i < PART; i++) {
        int number = none == 0 ? (int)rintf(x[i] * up) : 0;
        numbers[i] = (int16_t)number;
        sum += number;
    }
    float unit = largest > LEAST ? largest / 32767 + none : none;
    return (scale){unit, unit * (float)sum};
}

INLINE void round_row(int type, const float *x, long inputs, long row, const rounded *out) {
    long parts = inputs / PART;
    for (long part = 0; part < parts; part++) {
        long at = row * parts + part;
        scale found = round_part(x + part * PART, out->numbers + at * PART);
        out->units[at] = type == Q6_K ? (scale){found.factor, found.factor} : found;
    }
}

#endif
#endif
