/* Vectors of float and int32 of the machine's natural width, and the few operations that C's operators lack.
 *
 * VL lanes: 16 with AVX-512, 8 with AVX2, else 4, which every compiler maps to what the machine has. JF_PLAIN takes
 * the 4-lane form anywhere. */
#ifndef JF_SIMD_H
#define JF_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(JF_PLAIN) && (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)))
#include <immintrin.h>
#define JF_X86 1
#endif

#if defined(JF_X86) && defined(__AVX512F__)
#define VL 16
#elif defined(JF_X86)
#define VL 8
#else
#define VL 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));

/* The registers of a product's tile: OUTS rows of weight by at most MOST_ROWS rows of activations. */
#define OUTS 4
#if VL == 8
#define MOST_ROWS 2
#else
#define MOST_ROWS 6
#endif

INLINE vf vf_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf vf_all(float x) { return x - (vf){0}; }

INLINE vf vf_of(vi v) { return __builtin_convertvector(v, vf); }

/* a * b + c, rounded once where the machine can. Written out, since compilers that tune for some processors contract
 * one long chain of sums otherwise than several short ones, and a sum would depend on how many are made at once. */
INLINE float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vf vf_fused(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    vf out;
    for (int lane = 0; lane < VL; lane++) out[lane] = fused(a[lane], b[lane], c[lane]);
    return out;
#endif
}

/* Halves are added until one number is left: the same order in every form. */
INLINE float vf_sum(vf v) {
#if VL == 16
    __m512 wide = (__m512)v;
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)wide, 1));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(wide), upper);
#elif VL == 8
    __m256 half = (__m256)v;
#endif
#if VL > 4
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

INLINE float half_bits(uint16_t h) {
#if defined(JF_X86)
    return _cvtsh_ss(h);
#else
    /* Exponent and fraction go where float32 has them; the factor 2^112 mends the bias, subnormals included. */
    uint32_t wide = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float value, factor = 0x1p112f;
    memcpy(&value, &wide, 4);
    value = (h & 0x7c00) == 0x7c00 ? ((h & 0x3ff) ? NAN : INFINITY) : value * factor;
    memcpy(&wide, &value, 4);
    wide |= sign;
    memcpy(&value, &wide, 4);
    return value;
#endif
}

INLINE float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return half_bits(h);
}

INLINE float bf16_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t wide = (uint32_t)h << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* VL unsigned or signed bytes, bfloat16 or float16 numbers, widened. */

#if VL == 16
INLINE vi vi_u8(const uint8_t *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi vi_i8(const uint8_t *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_bf16(const uint8_t *p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
INLINE vf vf_half(const uint8_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#elif VL == 8
INLINE vi vi_u8(const uint8_t *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vi vi_i8(const uint8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vf vf_bf16(const uint8_t *p) {
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
INLINE vf vf_half(const uint8_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#else
INLINE vi vi_u8(const uint8_t *p) { return (vi){p[0], p[1], p[2], p[3]}; }
INLINE vi vi_i8(const uint8_t *p) { return (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
INLINE vf vf_bf16(const uint8_t *p) { return (vf){bf16_at(p), bf16_at(p + 2), bf16_at(p + 4), bf16_at(p + 6)}; }
INLINE vf vf_half(const uint8_t *p) { return (vf){half_at(p), half_at(p + 2), half_at(p + 4), half_at(p + 6)}; }
#endif

/* exp within 2 units in the last place between -87.3 and 88.3; constant outside.
 * x = n ln 2 + r with |r| <= ln 2 / 2, and a Taylor polynomial of degree 7 in r. */
INLINE vf vf_exp(vf x) {
    const vf high = vf_all(88.3f), low = vf_all(-87.3f), magic = vf_all(0x1.8p23f);
    vi over = x > high, under = x < low;
    x = (vf)(((vi)high & over) | ((vi)x & ~over));
    x = (vf)(((vi)low & under) | ((vi)x & ~under));
    vf shifted = x * 1.44269504f + magic, n = shifted - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi power = (((vi)shifted - (vi)magic) + 127) << 23;
    return p * (vf)power;
}

/* erf within 2e-7: Abramowitz and Stegun, formula 7.1.26. */
INLINE vf vf_erf(vf x) {
    vi sign = (vi)x & INT32_MIN;
    x = (vf)((vi)x ^ sign);
    vf t = 1.0f / (1.0f + 0.3275911f * x);
    vf p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return (vf)((vi)(1.0f - p * t * vf_exp(-x * x)) | sign);
}

INLINE vf vf_tanh(vf x) { return 1.0f - 2.0f / (vf_exp(x + x) + 1.0f); }

#endif
