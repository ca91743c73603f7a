/* Norms, gated activations and rotation. Rows are contiguous inside; strides are in numbers. */
#include <stddef.h>

#include "simd.h"
#include "team.h"

#define FEW_NUMBERS 16384
#define ITEM_ROWS 8 /* rows of one item, so that little time goes into sharing them out */

/* Rows [row, stop) of an item. */
#define ROWS_OF(item, rows) \
    long row = (item) * ITEM_ROWS, stop = row + ITEM_ROWS < (rows) ? row + ITEM_ROWS : (rows)

static long items_of(long rows) { return (rows + ITEM_ROWS - 1) / ITEM_ROWS; }

INLINE float square_sum(const float *x, long size) {
    vf sum = {0}, other = {0};
    long i = 0;
    for (; i + 2 * VL <= size; i += 2 * VL) {
        vf a = vf_load(x + i), b = vf_load(x + i + VL);
        sum += a * a;
        other += b * b;
    }
    float total = vf_sum(sum + other);
    for (; i < size; i++) total += x[i] * x[i];
    return total;
}

/* out may be x. */
INLINE void norm_row(const float *x, const float *weight, float *out, long size, float eps) {
    float factor = 1.0f / sqrtf(square_sum(x, size) / size + eps);
    long i = 0;
    for (; i + VL <= size; i += VL) vf_store(out + i, vf_load(x + i) * factor * vf_load(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

typedef struct {
    const float *x, *residual, *weight;
    float *out, *total;
    long rows, inner, x_outer, x_inner, residual_stride, size;
    float eps;
} norms;

static void norm_item(void *task, long item, int member) {
    const norms *n = task;
    (void)member;
    ROWS_OF(item, n->rows);
    for (; row < stop; row++) {
        const float *x = n->x + row / n->inner * n->x_outer + row % n->inner * n->x_inner;
        norm_row(x, n->weight, n->out + row * n->size, n->size, n->eps);
    }
}

/* out [rows, size], contiguous; row r of x lies at (r / inner) * x_outer + (r % inner) * x_inner. */
void jf_rms_norm(const float *x, const float *weight, float *out, long rows, long inner, long x_outer, long x_inner,
                 long size, float eps, int threads) {
    norms n = {x, NULL, weight, out, NULL, rows, inner, x_outer, x_inner, 0, size, eps};
    jf_run(norm_item, &n, items_of(rows), rows * size < FEW_NUMBERS ? 1 : threads);
}

static void add_norm_row(const norms *n, long row) {
    const float *x = n->x + row * n->x_outer, *residual = n->residual + row * n->residual_stride;
    float *total = n->total + row * n->size;
    long i = 0;
    for (; i + VL <= n->size; i += VL) vf_store(total + i, vf_load(x + i) + vf_load(residual + i));
    for (; i < n->size; i++) total[i] = x[i] + residual[i];
    norm_row(total, n->weight, n->out + row * n->size, n->size, n->eps);
}

static void add_norm_item(void *task, long item, int member) {
    const norms *n = task;
    (void)member;
    ROWS_OF(item, n->rows);
    for (; row < stop; row++) add_norm_row(n, row);
}

/* total = x + residual and out = norm(total), both [rows, size], contiguous. */
void jf_add_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *total, long rows,
                     long x_stride, long residual_stride, long size, float eps, int threads) {
    norms n = {x, residual, weight, out, total, rows, 1, x_stride, 0, residual_stride, size, eps};
    jf_run(add_norm_item, &n, items_of(rows), rows * size < FEW_NUMBERS ? 1 : threads);
}

enum { SILU, GELU, GELU_TANH };

INLINE vf activate(int kind, vf g) {
    if (kind == SILU) return g / (1.0f + vf_exp(-g));
    if (kind == GELU_TANH) return 0.5f * g * (1.0f + vf_tanh(0.7978845608f * (g + 0.044715f * g * g * g)));
    return 0.5f * g * (1.0f + vf_erf(g * 0.70710678f));
}

INLINE void gated_part(int kind, const float *x, float *out, long width, long size) {
    long i = 0;
    for (; i + VL <= size; i += VL) vf_store(out + i, activate(kind, vf_load(x + i)) * vf_load(x + width + i));
    if (i < size) {
        float gate[VL] = {0}, up[VL] = {0};
        memcpy(gate, x + i, (size - i) * 4);
        memcpy(up, x + width + i, (size - i) * 4);
        vf_store(gate, activate(kind, vf_load(gate)) * vf_load(up));
        memcpy(out + i, gate, (size - i) * 4);
    }
}

typedef struct {
    int kind;
    const float *x;
    float *out;
    long x_stride, width, parts;
} gates;

#define GATE_PART 1024

static void gated_item(void *task, long item, int member) {
    const gates *g = task;
    (void)member;
    long row = item / g->parts, at = item % g->parts * GATE_PART;
    long size = g->width - at < GATE_PART ? g->width - at : GATE_PART;
    const float *x = g->x + row * g->x_stride + at;
    float *out = g->out + row * g->width + at;
    switch (g->kind) {
    case SILU: gated_part(SILU, x, out, g->width, size); break;
    case GELU: gated_part(GELU, x, out, g->width, size); break;
    default: gated_part(GELU_TANH, x, out, g->width, size);
    }
}

/* out [rows, width] = activation(x[:, :width]) * x[:, width:]. */
void jf_gated(int kind, const float *x, float *out, long rows, long x_stride, long width, int threads) {
    gates g = {kind, x, out, x_stride, width, (width + GATE_PART - 1) / GATE_PART};
    jf_run(gated_item, &g, rows * g.parts, rows * width < FEW_NUMBERS ? 1 : threads);
}

INLINE void rotate_head(float *x, const float *cos_sin, long half) {
    const float *cosine = cos_sin, *sine = cos_sin + half;
    long i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cosine + i), s = vf_load(sine + i);
        vf_store(x + i, a * c - b * s);
        vf_store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

typedef struct {
    float *x;
    const float *cos_sin;
    long heads, x_token, x_head, cos_stride, half;
} rotation;

static void rotate_item(void *task, long token, int member) {
    const rotation *r = task;
    (void)member;
    for (long head = 0; head < r->heads; head++)
        rotate_head(r->x + token * r->x_token + head * r->x_head, r->cos_sin + token * r->cos_stride, r->half);
}

/* Rotate pairs (i, i + half) of every head of x [tokens, heads, ...] in place. */
void jf_rotary(float *x, const float *cos_sin, long tokens, long heads, long x_token, long x_head, long cos_stride,
               long half, int threads) {
    rotation r = {x, cos_sin, heads, x_token, x_head, cos_stride, half};
    jf_run(rotate_item, &r, tokens, tokens * heads * half < FEW_NUMBERS ? 1 : threads);
}

/* Pages [page, head, place, size]; strides in numbers, contiguous inside a vector. */
typedef struct {
    float *base;
    long page, head, place;
} plane;

typedef struct {
    float *qkv;
    const float *cos_sin, *q_weight, *k_weight;
    const int64_t *slots;
    plane keys, values;
    long stride, cos_stride, half, heads, kv_heads, size, value_size, block;
    float eps;
} preparation;

static void prepare_item(void *task, long token, int member) {
    const preparation *p = task;
    (void)member;
    float *row = p->qkv + token * p->stride;
    long both = p->heads + p->kv_heads;
    for (long head = 0; head < both; head++) {
        float *x = row + head * p->size;
        const float *weight = head < p->heads ? p->q_weight : p->k_weight;
        if (weight) norm_row(x, weight, x, p->size, p->eps);
        if (p->cos_sin) rotate_head(x, p->cos_sin + token * p->cos_stride, p->half);
    }
    int64_t slot = p->slots[token];
    if (slot < 0) return;
    long page = slot / p->block, place = slot % p->block;
    for (long head = 0; head < p->kv_heads; head++) {
        const float *key = row + (p->heads + head) * p->size;
        const float *value = row + both * p->size + head * p->value_size;
        memcpy(p->keys.base + page * p->keys.page + head * p->keys.head + place * p->keys.place, key, p->size * 4);
        memcpy(p->values.base + page * p->values.page + head * p->values.head + place * p->values.place, value,
               p->value_size * 4);
    }
}

/* Norm (weights may be NULL) and rotation (cos_sin may be NULL) of queries and keys in place, and the cache write.
 * A row of qkv holds heads * size queries, kv_heads * size keys and kv_heads * value_size values; with heads = 0 it is
 * the write alone. A negative slot is not written. */
void jf_prepare(float *qkv, long stride, const float *cos_sin, long cos_stride, long half, const float *q_weight,
                const float *k_weight, float eps, float *keys, long k_page, long k_head, long k_place, float *values,
                long v_page, long v_head, long v_place, const int64_t *slots, long tokens, long heads, long kv_heads,
                long size, long value_size, long block, int threads) {
    preparation p = {qkv,    cos_sin, q_weight, k_weight, slots, {keys, k_page, k_head, k_place},
                     {values, v_page, v_head, v_place}, stride, cos_stride, half, heads, kv_heads, size, value_size,
                     block,  eps};
    jf_run(prepare_item, &p, tokens, tokens * (heads + 2 * kv_heads) * size < FEW_NUMBERS ? 1 : threads);
}

typedef struct {
    const float *keys_new, *values_new;
    const int64_t *slots;
    plane keys, values;
    long k_token, k_head, v_token, v_head, kv_heads, size, value_size, block;
} writing;

static void write_item(void *task, long token, int member) {
    const writing *w = task;
    (void)member;
    int64_t slot = w->slots[token];
    if (slot < 0) return;
    long page = slot / w->block, place = slot % w->block;
    for (long head = 0; head < w->kv_heads; head++) {
        memcpy(w->keys.base + page * w->keys.page + head * w->keys.head + place * w->keys.place,
               w->keys_new + token * w->k_token + head * w->k_head, w->size * 4);
        memcpy(w->values.base + page * w->values.page + head * w->values.head + place * w->values.place,
               w->values_new + token * w->v_token + head * w->v_head, w->value_size * 4);
    }
}

/* Store keys and values [tokens, kv_heads, size]; a negative slot is not written. */
void jf_write(const float *keys_new, long k_token, long k_head, const float *values_new, long v_token, long v_head,
              float *keys, long k_page, long k_plane_head, long k_place, float *values, long v_page, long v_plane_head,
              long v_place, const int64_t *slots, long tokens, long kv_heads, long size, long value_size, long block,
              int threads) {
    writing w = {keys_new, values_new, slots, {keys, k_page, k_plane_head, k_place},
                 {values, v_page, v_plane_head, v_place}, k_token, k_head, v_token, v_head, kv_heads, size, value_size,
                 block};
    jf_run(write_item, &w, tokens, tokens * kv_heads * size < FEW_NUMBERS ? 1 : threads);
}
