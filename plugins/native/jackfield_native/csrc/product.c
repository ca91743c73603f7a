/* Products of few rows of activations with a weight that is read once, and decoding of weights. */
#include <stddef.h>

#include "integers.h"
#include "team.h"

#ifndef AHEAD
#define AHEAD 8192 /* bytes of weight */
#endif

/* x [rows, inputs] and out [rows, outputs], strides in numbers; weight [outputs] rows of `weight_stride` bytes. */
typedef struct {
    int type;
    const uint8_t *weight;
    long weight_stride;
    const float *x;
    long x_stride;
    const float *bias;
    float *out;
    long out_stride;
    long rows, outputs, inputs;
    float *scratch; /* OUTS * inputs for each thread, where a part of the weight is decoded first */
    long chunk;     /* outputs of one item */
    rounded narrow; /* the rows in 16 bits, where they are multiplied so */
} product;

/* Rows of weight are short and lie one after another, so that a processor's own prefetching stops at each of them. */
INLINE void prefetch(const uint8_t *from, long bytes) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

/* OUTS_NOW x ROWS_NOW sums; both constants where this is called, so that sums stay in registers. The order of a sum
 * does not depend on either. */
INLINE void tile(int type, int OUTS_NOW, int ROWS_NOW, const product *p, const uint8_t *weight, long stride, long row,
                 long output) {
    vf sum[OUTS][MOST_ROWS];
    scale scales[OUTS][SPAN];
    const float *x = p->x + row * p->x_stride;
    for (int o = 0; o < OUTS_NOW; o++)
        for (int r = 0; r < ROWS_NOW; r++) sum[o][r] = (vf){0};
    long parts = p->inputs / PART, step = parts ? OUTS_NOW * stride / parts : 0;
    for (long first = 0; first < parts; first += SPAN) {
        long count = parts - first < SPAN ? parts - first : SPAN;
        if (type >= Q4_0)
            for (int o = 0; o < OUTS_NOW; o++) part_scales(type, weight + o * stride, first, count, scales[o]);
        for (long i = 0; i < count; i++) {
            long part = first + i;
            if (ROWS_NOW == 1 && type != F32) prefetch(weight + AHEAD + part * step, step);
#pragma GCC unroll 8
            for (int piece = 0; piece < PIECES; piece++) {
                vf w[OUTS];
#pragma GCC unroll 4
                for (int o = 0; o < OUTS_NOW; o++) w[o] = decode(type, weight + o * stride, part, piece, &scales[o][i]);
#pragma GCC unroll 6
                for (int r = 0; r < ROWS_NOW; r++) {
                    vf a = vf_load(x + r * p->x_stride + part * PART + piece * VL);
#pragma GCC unroll 4
                    for (int o = 0; o < OUTS_NOW; o++) sum[o][r] = vf_fused(w[o], a, sum[o][r]);
                }
            }
        }
    }
    for (int o = 0; o < OUTS_NOW; o++)
        for (int r = 0; r < ROWS_NOW; r++) {
            float total = vf_sum(sum[o][r]);
            for (long i = parts * PART; i < p->inputs; i++)
                total = fused(decode_one(type, weight + o * stride, i), x[r * p->x_stride + i], total);
            p->out[(row + r) * p->out_stride + output + o] = p->bias ? total + p->bias[output + o] : total;
        }
}

#define CASE(OUTS_NOW, ROWS_NOW)                                                                                       \
    case ROWS_NOW: tile(F32, OUTS_NOW, ROWS_NOW, p, weight, stride, row, output); break;

#if MOST_ROWS == 6
#define CASES(OUTS_NOW)                                                                                                \
    CASE(OUTS_NOW, 1) CASE(OUTS_NOW, 2) CASE(OUTS_NOW, 3) CASE(OUTS_NOW, 4) CASE(OUTS_NOW, 5) CASE(OUTS_NOW, 6)
#else
#define CASES(OUTS_NOW) CASE(OUTS_NOW, 1) CASE(OUTS_NOW, 2)
#endif

static void tile_four(const product *p, const uint8_t *weight, long stride, long row, int rows, long output) {
    switch (rows) { CASES(OUTS) }
}

static void tile_one(const product *p, const uint8_t *weight, long stride, long row, int rows, long output) {
    switch (rows) { CASES(1) }
}

/* All rows for `count` outputs whose weight is float32. Rows are split evenly, so that no tile is thin. */
static void float_outputs(const product *p, const uint8_t *weight, long stride, long output, int count) {
    long tiles = (p->rows + MOST_ROWS - 1) / MOST_ROWS, row = 0;
    for (long t = 0; t < tiles; t++) {
        int rows = (int)((p->rows - row + tiles - t - 1) / (tiles - t));
        if (count == OUTS)
            tile_four(p, weight, stride, row, rows, output);
        else
            for (int o = 0; o < count; o++) tile_one(p, weight + o * stride, stride, row, rows, output + o);
        row += rows;
    }
}

INLINE void decode_row(int type, const uint8_t *row, long stride, float *out, long inputs) {
    long parts = inputs / PART, step = parts ? stride / parts : 0;
    for (long part = 0; part < parts; part++) {
        prefetch(row + AHEAD + part * step, step);
        scale s = {0, 0};
        if (type >= Q4_0) s = part_scale(type, row, part);
#pragma GCC unroll 8
        for (int piece = 0; piece < PIECES; piece++)
            vf_store(out + part * PART + piece * VL, decode(type, row, part, piece, &s));
    }
    for (long i = parts * PART; i < inputs; i++) out[i] = decode_one(type, row, i);
}

#define EACH_TYPE(DO)                                                                                                  \
    DO(F32) DO(BF16) DO(F16) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K)

static void decode_any(int type, const uint8_t *row, long stride, float *out, long inputs) {
    switch (type) {
#define DECODE(TYPE)                                                                                                   \
    case TYPE: decode_row(TYPE, row, stride, out, inputs); break;
        EACH_TYPE(DECODE)
    }
}

static void one_row_four(const product *p, const uint8_t *weight, long output) {
    switch (p->type) {
#define ONE_ROW(TYPE)                                                                                                  \
    case TYPE: tile(TYPE, OUTS, 1, p, weight, p->weight_stride, 0, output); break;
        EACH_TYPE(ONE_ROW)
    }
}

#ifdef JF_INTEGERS

/* As tile(), with integers: packed numbers times rows in 16 bits, summed exactly inside a part. */
INLINE void integer_tile(int type, int OUTS_NOW, int ROWS_NOW, const product *p, const uint8_t *weight, long output) {
    vf sum[OUTS][INTEGER_ROWS], rest[OUTS][INTEGER_ROWS];
    scale scales[OUTS][SPAN], units[OUTS][INTEGER_ROWS][SPAN];
    long stride = p->weight_stride, parts = p->inputs / PART, step = OUTS_NOW * stride / parts;
    for (int o = 0; o < OUTS_NOW; o++)
        for (int r = 0; r < ROWS_NOW; r++) sum[o][r] = rest[o][r] = (vf){0};
    for (long first = 0; first < parts; first += SPAN) {
        long count = parts - first < SPAN ? parts - first : SPAN;
        for (int o = 0; o < OUTS_NOW; o++) {
            part_scales(type, weight + o * stride, first, count, scales[o]);
            for (int r = 0; r < ROWS_NOW; r++)
                rest[o][r] = scaled(scales[o], p->narrow.units + r * parts + first, count, units[o][r], rest[o][r]);
        }
        for (long i = 0; i < count; i++) {
            long part = first + i;
            prefetch(weight + AHEAD + part * step, step);
            codes w[OUTS];
#pragma GCC unroll 4
            for (int o = 0; o < OUTS_NOW; o++)
                w[o] = codes_of(type, weight + o * stride, part);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS_NOW; r++) {
                codes x = codes_at(p->narrow.numbers + (r * parts + part) * PART);
#pragma GCC unroll 4
                for (int o = 0; o < OUTS_NOW; o++) {
                    const scale *unit = &units[o][r][i];
                    if (type == Q6_K) {
                        sum[o][r] = vf_fused(pairs_of(w[o].first, x.first), vf_all(unit->factor), sum[o][r]);
                        sum[o][r] = vf_fused(pairs_of(w[o].second, x.second), vf_all(unit->offset), sum[o][r]);
                    } else
                        sum[o][r] = vf_fused(sums_of(w[o], x), vf_all(unit->factor), sum[o][r]);
                }
            }
        }
    }
    for (int o = 0; o < OUTS_NOW; o++)
        for (int r = 0; r < ROWS_NOW; r++) {
            float total = vf_sum(sum[o][r]);
            if (type != Q6_K && type != Q8_0) total += offsets_of(rest[o][r]);
            p->out[r * p->out_stride + output + o] = p->bias ? total + p->bias[output + o] : total;
        }
}

/* One row has room for four outputs in registers, several have it for two. */
INLINE void integer_outputs(int type, const product *p, const uint8_t *weight, long output, int count) {
    int outs = p->rows == 1 ? OUTS : 2;
    for (int at = 0; at < count; at += outs, weight += outs * p->weight_stride, output += outs) {
        int now = count - at < outs ? 1 : outs;
        if (now == 1) outs = 1;
        switch (p->rows * 8 + now) {
#define INTEGER_CASE(ROWS, NOW)                                                                                        \
    case ROWS * 8 + NOW: integer_tile(type, NOW, ROWS, p, weight, output); break;
            INTEGER_CASE(1, 1) INTEGER_CASE(2, 1) INTEGER_CASE(3, 1) INTEGER_CASE(4, 1)
            INTEGER_CASE(1, 4) INTEGER_CASE(2, 2) INTEGER_CASE(3, 2) INTEGER_CASE(4, 2)
        }
    }
}

static void any_integer_outputs(const product *p, const uint8_t *weight, long output, int count) {
    switch (p->type) {
#define INTEGER(TYPE)                                                                                                  \
    case TYPE: integer_outputs(TYPE, p, weight, output, count); break;
        INTEGER(Q4_0) INTEGER(Q4_1) INTEGER(Q5_0) INTEGER(Q5_1) INTEGER(Q8_0) INTEGER(Q4_K) INTEGER(Q5_K) INTEGER(Q6_K)
    }
}

#endif

static void some_outputs(const product *p, long output, int count, int member) {
    const uint8_t *weight = p->weight + output * p->weight_stride;
#ifdef JF_INTEGERS
    if (p->narrow.numbers) {
        any_integer_outputs(p, weight, output, count);
        return;
    }
#endif
    if (p->rows == 1 && count == OUTS) {
        one_row_four(p, weight, output);
        return;
    }
    if (p->type == F32) {
        float_outputs(p, weight, p->weight_stride, output, count);
        return;
    }
    float *scratch = p->scratch + (long)member * OUTS * p->inputs;
    for (int o = 0; o < count; o++)
        decode_any(p->type, weight + o * p->weight_stride, p->weight_stride, scratch + o * p->inputs, p->inputs);
    float_outputs(p, (const uint8_t *)scratch, p->inputs * 4, output, count);
}

static void product_item(void *task, long item, int member) {
    const product *p = task;
    long output = item * p->chunk, stop = output + p->chunk;
    if (stop > p->outputs) stop = p->outputs;
    for (; output < stop; output += OUTS)
        some_outputs(p, output, stop - output < OUTS ? (int)(stop - output) : OUTS, member);
}

#define ITEM_BYTES 65536
#define FEW_OPERATIONS 65536

static long chunk_of(long outputs, long row_bytes, int threads) {
    long by_bytes = ITEM_BYTES / (row_bytes + 1), by_threads = outputs / (4 * threads);
    long chunk = by_bytes < by_threads ? by_bytes : by_threads;
    return chunk < OUTS ? OUTS : chunk / OUTS * OUTS;
}

/* Up to how many rows this build multiplies packed numbers as integers; 0 where it does not. */
int jf_integer_rows(void) {
#ifdef JF_INTEGERS
    return INTEGER_ROWS;
#else
    return 0;
#endif
}

/* out = x @ weight.T + bias. `scratch` holds threads * OUTS * inputs numbers; it may be NULL for float32
 * weights, and for one row where outputs is a multiple of OUTS. With `integers`, for packed types and up to
 * INTEGER_ROWS rows, these are rounded to 16 bits in parts; then `scratch` holds rows * inputs * 9 / 16 numbers. */
void jf_product(int type, const void *weight, long weight_stride, const float *x, long x_stride, const float *bias,
                float *out, long out_stride, long rows, long outputs, long inputs, float *scratch, int integers,
                int threads) {
    if (rows == 0 || outputs == 0) return;
    if (rows * outputs * inputs < FEW_OPERATIONS) threads = 1;
    product p = {type,       weight, weight_stride, x,      x_stride, bias,
                 out,        out_stride, rows,      outputs, inputs,  scratch, chunk_of(outputs, weight_stride, threads),
                 {0, 0}};
#ifdef JF_INTEGERS
    if (integers) {
        p.narrow.units = (scale *)scratch;
        p.narrow.numbers = (int16_t *)(p.narrow.units + rows * inputs / PART);
        for (long row = 0; row < rows; row++) round_row(type, x + row * x_stride, inputs, row, &p.narrow);
    }
#else
    (void)integers;
#endif
    jf_run(product_item, &p, (outputs + p.chunk - 1) / p.chunk, threads);
}

typedef struct {
    int type;
    const uint8_t *weight;
    long weight_stride;
    float *out;
    long out_stride, rows, inputs, chunk;
} decoding;

static void decode_item(void *task, long item, int member) {
    const decoding *d = task;
    (void)member;
    long row = item * d->chunk, stop = row + d->chunk;
    if (stop > d->rows) stop = d->rows;
    for (; row < stop; row++)
        decode_any(d->type, d->weight + row * d->weight_stride, d->weight_stride, d->out + row * d->out_stride,
                   d->inputs);
}

/* out [rows, inputs] = the numbers of `rows` rows of weight. */
void jf_decode(int type, const void *weight, long weight_stride, float *out, long out_stride, long rows, long inputs,
               int threads) {
    if (rows * inputs < FEW_OPERATIONS) threads = 1;
    decoding d = {type, weight, weight_stride, out, out_stride, rows, inputs, chunk_of(rows, weight_stride, threads)};
    jf_run(decode_item, &d, (rows + d.chunk - 1) / d.chunk, threads);
}
