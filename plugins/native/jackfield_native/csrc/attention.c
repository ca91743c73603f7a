/* Softmax attention of single queries over pages of keys and values, with the sums of arXiv:1805.02867.
 *
 * A row is one query token and the tokens [first, seen) of its sequence. Strides are in numbers. */
#include <stddef.h>

#include "simd.h"
#include "team.h"

#define MOST_SIZE 512
#define SPAN 64 /* tokens whose scores are held at once */

typedef struct {
    const float *q, *keys, *values;
    float *out;
    const int32_t *tokens, *sequences, *first, *seen, *table;
    long q_token, q_head, k_page, k_head, k_place, v_page, v_head, v_place, out_token, out_head, table_stride;
    long heads, group, together, size, value_size, block;
    float scale, softcap;
} attention;

/* What a query has collected so far. */
typedef struct {
    float best, total;
    float mixed[MOST_SIZE];
} state;

INLINE float dot(const float *a, const float *b, long size) {
    vf sum = {0};
    long i = 0;
    for (; i + VL <= size; i += VL) sum = vf_fused(vf_load(a + i), vf_load(b + i), sum);
    float total = vf_sum(sum);
    for (; i < size; i++) total = fused(a[i], b[i], total);
    return total;
}

/* Four products at once hide each other's latency. */
INLINE void four_dots(const float *q, const float *k, long place, long size, float *out) {
    vf sum[4] = {{0}, {0}, {0}, {0}};
    long i = 0;
    for (; i + VL <= size; i += VL) {
        vf a = vf_load(q + i);
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) sum[n] = vf_fused(a, vf_load(k + n * place + i), sum[n]);
    }
    for (int n = 0; n < 4; n++) {
        out[n] = vf_sum(sum[n]);
        for (long rest = i; rest < size; rest++) out[n] = fused(q[rest], k[n * place + rest], out[n]);
    }
}

static void score(const attention *a, const float *q, const float *k, int count, float *scores) {
    int n = 0;
    for (; n + 4 <= count; n += 4) four_dots(q, k + n * a->k_place, a->k_place, a->size, scores + n);
    for (; n < count; n++) scores[n] = dot(q, k + n * a->k_place, a->size);
    for (n = 0; n < count; n++) scores[n] *= a->scale;
    if (a->softcap != 0)
        for (n = 0; n < count; n++) scores[n] = a->softcap * tanhf(scores[n] / a->softcap);
}

/* Turn scores (padded to whole vectors with -inf) into weights, and rescale what was collected under a smaller best. */
static void weigh(state *s, float *scores, int count, long value_size) {
    float best = s->best;
    for (int n = 0; n < count; n++) best = scores[n] > best ? scores[n] : best;
    for (int n = count; n < (count + VL - 1) / VL * VL; n++) scores[n] = -INFINITY;
    vf sum = {0};
    for (int n = 0; n < count; n += VL) {
        vf weight = vf_exp(vf_load(scores + n) - best);
        vf_store(scores + n, weight);
    }
    for (int n = count; n < (count + VL - 1) / VL * VL; n++) scores[n] = 0;
    for (int n = 0; n < count; n += VL) sum += vf_load(scores + n);
    if (best > s->best) {
        float factor = s->best == -INFINITY ? 0 : expf(s->best - best);
        s->total *= factor;
        for (long i = 0; i < value_size; i++) s->mixed[i] *= factor;
    }
    s->best = best;
    s->total += vf_sum(sum);
}

INLINE void mix_columns(int width, state *s, const float *weights, const float *v, long place, int count, long at) {
    vf sum[4];
    for (int c = 0; c < width; c++) sum[c] = vf_load(s->mixed + at + c * VL);
    for (int n = 0; n < count; n++) {
        vf weight = vf_all(weights[n]);
#pragma GCC unroll 4
        for (int c = 0; c < width; c++) sum[c] += weight * vf_load(v + n * place + at + c * VL);
    }
    for (int c = 0; c < width; c++) vf_store(s->mixed + at + c * VL, sum[c]);
}

static void mix(state *s, const float *weights, const float *v, long place, int count, long value_size) {
    long at = 0;
    for (; at + 4 * VL <= value_size; at += 4 * VL) mix_columns(4, s, weights, v, place, count, at);
    for (; at + VL <= value_size; at += VL) mix_columns(1, s, weights, v, place, count, at);
    for (; at < value_size; at++)
        for (int n = 0; n < count; n++) s->mixed[at] += weights[n] * v[n * place + at];
}

#define MOST_TOGETHER 8 /* query heads that read keys and values at the same time */

/* `count` query heads from `head` on, which share a head of the cache. */
static void attend_heads(const attention *a, long row, long head, long count) {
    state states[MOST_TOGETHER];
    float scores[SPAN];
    for (long h = 0; h < count; h++) {
        states[h].best = -INFINITY;
        states[h].total = 0;
        memset(states[h].mixed, 0, a->value_size * 4);
    }
    long kv_head = head / a->group;
    const float *q = a->q + a->tokens[row] * a->q_token + head * a->q_head;
    const int32_t *table = a->table + a->sequences[row] * a->table_stride;
    for (long at = a->first[row]; at < a->seen[row];) {
        long place = at % a->block, page = table[at / a->block], span = a->block - place;
        if (span > SPAN) span = SPAN;
        if (span > a->seen[row] - at) span = a->seen[row] - at;
        const float *k = a->keys + page * a->k_page + kv_head * a->k_head + place * a->k_place;
        const float *v = a->values + page * a->v_page + kv_head * a->v_head + place * a->v_place;
        for (long h = 0; h < count; h++) {
            score(a, q + h * a->q_head, k, (int)span, scores);
            weigh(&states[h], scores, (int)span, a->value_size);
            mix(&states[h], scores, v, a->v_place, (int)span, a->value_size);
        }
        at += span;
    }
    for (long h = 0; h < count; h++) {
        float *out = a->out + a->tokens[row] * a->out_token + (head + h) * a->out_head;
        for (long i = 0; i < a->value_size; i++) out[i] = states[h].mixed[i] / states[h].total;
    }
}

static void attend_item(void *task, long item, int member) {
    const attention *a = task;
    (void)member;
    long items = a->heads / a->together;
    attend_heads(a, item / items, item % items * a->together, a->together);
}

/* Heads of a group stay together where there is work enough for all threads without taking them apart. */
static long heads_together(long rows, long heads, long group, int threads) {
    long together = group < MOST_TOGETHER ? group : MOST_TOGETHER;
    while (group % together) together--;
    return rows * heads / together >= 4 * threads ? together : 1;
}

/* Attend from `rows` single queries. size and value_size are at most MOST_SIZE; every row sees a token.
 *
 * q [tokens, heads, size], keys and values [page, kv_head, place, size], out [tokens, heads, value_size];
 * tokens, sequences, first, seen [rows]; table [sequences, blocks]. */
void jf_attend(const float *q, long q_token, long q_head, const float *keys, long k_page, long k_head, long k_place,
               const float *values, long v_page, long v_head, long v_place, float *out, long out_token, long out_head,
               const int32_t *tokens, const int32_t *sequences, const int32_t *first, const int32_t *seen,
               const int32_t *table, long table_stride, long rows, long heads, long kv_heads, long size,
               long value_size, long block, float scale, float softcap, int threads) {
    attention a = {q, keys, values, out, tokens, sequences, first, seen, table, q_token, q_head, k_page, k_head,
                   k_place, v_page, v_head, v_place, out_token, out_head, table_stride, heads, heads / kv_heads,
                   heads_together(rows, heads, heads / kv_heads, threads), size, value_size, block, scale, softcap};
    jf_run(attend_item, &a, rows * heads / a.together, threads);
}
