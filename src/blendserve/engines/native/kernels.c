/*
 * What the native engine computes on CPUs: rotary embedding + KV write, grouped-query attention over a paged KV cache
 * for prefill and decode alike, matrix products in fp32, what a layer does between its products, and the choice of
 * tokens. Plain C with GCC/Clang vector extensions, so one source serves SSE, AVX2, AVX-512 and NEON.
 *
 * Built once per element type and instruction set (kernels.py): by default tensors are fp32; with -DELEMENT_BF16 they
 * are bf16 in memory and fp32 in registers.
 *
 * Layout of the cache of one layer (a block holds `block_size` tokens; PAIR is 2 in bf16, else 1):
 *
 *     keys    [num_blocks, num_kv_heads, head_dim / PAIR, block_size, PAIR]    transposed: a vector holds one dimension
 *                                                                              (or two) of many keys
 *     values  [num_blocks, num_kv_heads, block_size / PAIR, head_dim, PAIR]
 *
 * Both products then have the same shape, a broadcast scalar times a vector of the cache, and need no horizontal sums:
 *
 *     scores[row][key]  += query[row][dim] * keys[dim][key]
 *     output[row][dim]  += weight[row][key] * values[key][dim]
 *
 * Pairs lie as AVX-512's bf16 instruction wants them, which multiplies both and adds them to one fp32 sum; elsewhere
 * one load brings two vectors, told apart by a shift and a mask.
 *
 * Blocking. A work item is one KV head and a run of tokens of one sequence (one token in decode); its rows are those
 * tokens times the query heads that share the KV head. It walks the keys in tiles of TILE_KEYS, and within a tile over
 * groups of at most GROUP_ROWS rows: GROUP_ROWS x 2 vectors of accumulators fill the registers, so every vector of the
 * cache that is loaded serves all rows of the group (decode reads the cache once for all heads that share it), and in
 * prefill the tile stays in the L1 cache for all groups. Softmax is online: a running maximum and sum per row.
 *
 * Blocks lie anywhere, so the hardware never sees the next one coming: each loop prefetches what the next will read,
 * the values of its keys or the keys one tile on, as much per iteration as it reads itself.
 *
 * Only keys that a row may see are ever weighed: unused places of a block may hold anything, even NaN. Tiles before
 * the window of all tokens of an item are not read.
 *
 * What a row gets depends on that row alone, not on the other rows or on the number of threads.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifndef LANES /* fp32 numbers in a vector */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
#define GROUP_ROWS 6
#define MAX_SUMS 12 /* accumulators: with 2 operands and a broadcast they fit in 16 registers */
#define TILE_KEYS 64
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef vec unaligned_vec __attribute__((aligned(4), may_alias));
typedef ivec unaligned_ivec __attribute__((aligned(2), may_alias));

ALWAYS_INLINE vec load_f32(const float *p) { return *(const unaligned_vec *)p; }
ALWAYS_INLINE void store_f32(float *p, vec x) { *(unaligned_vec *)p = x; }

/*
 * Elements, and what the two products of attention need of them: `cached` is a vector of the cache, `multiplier` a
 * number that it is multiplied by, PARTS how many multiplications a pair takes.
 */
#ifdef ELEMENT_BF16
#define PAIR 2
typedef uint16_t element;
typedef uint16_t half_vec __attribute__((vector_size(LANES * 2)));
typedef half_vec unaligned_half_vec __attribute__((aligned(2), may_alias));

ALWAYS_INLINE float widen(element x)
{
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}
ALWAYS_INLINE element narrow(float x) /* round to nearest even */
{
    union { float value; uint32_t bits; } u = {x};
    return (element)((u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16);
}
ALWAYS_INLINE vec load(const element *p)
{
    return (vec)(__builtin_convertvector(*(const unaligned_half_vec *)p, ivec) << 16);
}

typedef ivec cached;
ALWAYS_INLINE cached load_cached(const element *p) { return *(const unaligned_ivec *)p; }
ALWAYS_INLINE cached without_second(cached pairs) { return pairs & 0xffff; }

#if defined(__AVX512BF16__) && LANES == 16
#include <immintrin.h>
#define PARTS 1
typedef element multiplier;
ALWAYS_INLINE multiplier multiplier_of(element x) { return x; }
ALWAYS_INLINE void store(element *p, vec x)
{
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}
ALWAYS_INLINE void store_multipliers(multiplier *p, vec x) { store(p, x); }
ALWAYS_INLINE vec multiply_add(vec sum, cached pairs, int part, const multiplier *by)
{
    int32_t both;
    (void)part;
    memcpy(&both, by, sizeof both);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(both));
}
#else
#define PARTS 2
typedef float multiplier;
ALWAYS_INLINE multiplier multiplier_of(element x) { return widen(x); }
ALWAYS_INLINE void store(element *p, vec x)
{
    const uvec bits = (uvec)x;
    *(unaligned_half_vec *)p = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, half_vec);
}
ALWAYS_INLINE void store_multipliers(multiplier *p, vec x) { store_f32(p, x); }
ALWAYS_INLINE vec multiply_add(vec sum, cached pairs, int part, const multiplier *by)
{
    return sum + (vec)(part ? pairs & (int32_t)0xffff0000 : pairs << 16) * by[part];
}
#endif

#else /* fp32 */
#define PAIR 1
#define PARTS 1
typedef float element;
ALWAYS_INLINE float widen(element x) { return x; }
ALWAYS_INLINE element narrow(float x) { return x; }
ALWAYS_INLINE vec load(const element *p) { return load_f32(p); }
ALWAYS_INLINE void store(element *p, vec x) { store_f32(p, x); }

typedef vec cached;
ALWAYS_INLINE cached load_cached(const element *p) { return load_f32(p); }
ALWAYS_INLINE cached without_second(cached one) { return one; }

typedef float multiplier;
ALWAYS_INLINE multiplier multiplier_of(element x) { return x; }
ALWAYS_INLINE void store_multipliers(multiplier *p, vec x) { store_f32(p, x); }
ALWAYS_INLINE vec multiply_add(vec sum, cached one, int part, const multiplier *by)
{
    (void)part;
    return sum + one * *by;
}
#endif

ALWAYS_INLINE void prefetch(const element *p, int count)
{
    for (int i = 0; i < count; i += 64 / sizeof(element))
        __builtin_prefetch(p + i);
}
ALWAYS_INLINE int min_int(int a, int b) { return a < b ? a : b; }
ALWAYS_INLINE int64_t min_long(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS_INLINE vec either(ivec mask, vec x, vec y) { return (vec)(((ivec)x & mask) | ((ivec)y & ~mask)); }
ALWAYS_INLINE vec splat(float x) { return x - (vec){0}; }

/* exp(x) for x <= 0, about 1e-7 relative; exactly 0 below the smallest normal number. */
ALWAYS_INLINE vec exp_nonpositive(vec x)
{
    const vec exponent = x * 1.44269504f;
    const ivec in_range = exponent > -126.0f;
    const vec clamped = (vec)((ivec)exponent & in_range);
    const ivec whole = __builtin_convertvector(clamped - 0.5f, ivec); /* rounds: conversion truncates towards 0 */
    const vec rest = (clamped - __builtin_convertvector(whole, vec)) * 0.69314718f;
    vec power = rest * (1.0f / 5040) + (1.0f / 720); /* Taylor series, |rest| <= ln(2) / 2 */
    power = power * rest + (1.0f / 120);
    power = power * rest + (1.0f / 24);
    power = power * rest + (1.0f / 6);
    power = power * rest + 0.5f;
    power = power * rest + 1.0f;
    power = power * rest + 1.0f;
    return (vec)(((ivec)power + (whole << 23)) & in_range);
}

/* -------- attention -------- */

typedef struct {
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int32_t tokens_per_item; /* tokens of one work item at most */
    int32_t num_threads;
} Shape;

typedef struct {
    int32_t num_tokens, num_items, max_blocks;
    const int32_t *positions;    /* [num_tokens] */
    const int64_t *kv_slots;     /* [num_tokens] block * block_size + place in the block */
    const int32_t *query_starts; /* [num_rows + 1] first token of each row */
    const int32_t *context_lens; /* [num_rows] tokens of the sequence after this step */
    const int32_t *block_tables; /* [num_rows, max_blocks] */
    const int32_t *item_rows;    /* [num_items] row of each work item */
    const int32_t *item_tokens;  /* [num_items] first token of each work item */
} Step;

/* Rotate the queries and keys of `qkv` in place and copy its keys and values into the cache. */
void rope_and_store(const Shape *shape, const Step *step,
                    element *qkv,                  /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] */
                    const float *cos_table, const float *sin_table, /* [max_positions, head_dim / 2] */
                    element *keys, element *values)
{
    const int dim = shape->head_dim, half = dim / 2, block_size = shape->block_size;
    const int heads = shape->num_heads, kv_heads = shape->num_kv_heads;
    const int64_t width = (int64_t)(heads + 2 * kv_heads) * dim;

#pragma omp parallel for schedule(static) num_threads(shape->num_threads)
    for (int token = 0; token < step->num_tokens; token++) {
        element *row = qkv + token * width;
        const float *restrict cosine = cos_table + (int64_t)step->positions[token] * half;
        const float *restrict sine = sin_table + (int64_t)step->positions[token] * half;
        for (int head = 0; head < heads + kv_heads; head++) {
            element *restrict low = row + head * dim, *restrict high = low + half;
            for (int i = 0; i < half; i++) {
                const float x = widen(low[i]), y = widen(high[i]);
                low[i] = narrow(x * cosine[i] - y * sine[i]);
                high[i] = narrow(y * cosine[i] + x * sine[i]);
            }
        }
        const int64_t block = step->kv_slots[token] / block_size, place = step->kv_slots[token] % block_size;
        for (int head = 0; head < kv_heads; head++) {
            const int64_t page = (block * kv_heads + head) * dim * block_size;
            const element *key = row + (heads + head) * dim, *value = key + kv_heads * dim;
            element *key_column = keys + page + place * PAIR;
            element *value_row = values + page + (place - place % PAIR) * dim + place % PAIR;
            for (int i = 0; i < dim; i++) {
                key_column[(int64_t)(i / PAIR) * block_size * PAIR + i % PAIR] = key[i];
                value_row[i * PAIR] = value[i];
            }
        }
    }
}

/*
 * scores[row][0 .. vectors * LANES] = scale * query[row] . keys. `rows` and `vectors` are constants wherever this is
 * inlined, and rows * vectors at most MAX_SUMS.
 */
ALWAYS_INLINE void score_keys(const int rows, const int vectors, int dim, float scale,
                              const multiplier *query, /* [dim / PAIR, rows, PAIR] */
                              const element *keys,     /* [dim / PAIR, vectors * LANES, PAIR] */
                              long stride,             /* of the first of these dimensions */
                              float *scores,           /* [rows, TILE_KEYS] */
                              const element *ahead)    /* [dim * vectors * LANES] to prefetch */
{
    vec sums[MAX_SUMS] = {{0}};
    for (int i = 0; i < dim / PAIR; i++) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    sums[r * vectors + v] = multiply_add(sums[r * vectors + v], load_cached(keys + v * LANES * PAIR),
                                                         part, query + r * PAIR);
        query += rows * PAIR;
        keys += stride;
        prefetch(ahead + i * vectors * LANES * PAIR, vectors * LANES * PAIR);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            store_f32(scores + r * TILE_KEYS + v * LANES, sums[r * vectors + v] * scale);
}

/* output[row][0 .. vectors * LANES] += weights[row] . values; `rows` and `vectors` are constants, as above. */
ALWAYS_INLINE void weigh_values(const int rows, const int vectors, int dim, int num_keys,
                                const multiplier *weights, /* [rows, TILE_KEYS] */
                                const element *values,     /* [num_keys / PAIR, dim, PAIR], at these columns */
                                float *output,             /* [rows, dim], likewise */
                                const element *ahead)      /* [num_keys * vectors * LANES] to prefetch */
{
    vec sums[MAX_SUMS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r * vectors + v] = load_f32(output + r * dim + v * LANES);
    for (int key = 0; key + PAIR <= num_keys; key += PAIR) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    sums[r * vectors + v] = multiply_add(sums[r * vectors + v], load_cached(values + v * LANES * PAIR),
                                                         part, weights + r * TILE_KEYS + key);
        values += dim * PAIR;
        prefetch(ahead + key * vectors * LANES, vectors * LANES * PAIR);
    }
    if (num_keys % PAIR) /* the second of the last pair is nobody's yet */
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r * vectors + v] =
                    multiply_add(sums[r * vectors + v], without_second(load_cached(values + v * LANES * PAIR)), 0,
                                 weights + r * TILE_KEYS + num_keys - 1);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            store_f32(output + r * dim + v * LANES, sums[r * vectors + v]);
}

/* cap * tanh(x / cap) */
ALWAYS_INLINE vec soft_capped(vec x, float cap)
{
    const vec power = exp_nonpositive(either(x > 0.0f, -x, x) * (2.0f / cap));
    const vec capped = cap * (1.0f - power) / (1.0f + power);
    return either(x > 0.0f, capped, -capped);
}

/* What few models need done to the scores of a row; apart, to leave registers to the others. */
static __attribute__((noinline)) void cap_and_hide(float *scores, int num_scores, float soft_cap, int num_hidden)
{
    for (int key = 0; soft_cap > 0 && key < num_scores; key += LANES)
        store_f32(scores + key, soft_capped(load_f32(scores + key), soft_cap));
    for (int key = 0; key < min_int(num_hidden, num_scores); key++)
        scores[key] = -INFINITY;
}

/*
 * Turn the scores of one row into weights against the running maximum, and rescale what was summed before. The row sees
 * keys before `num_visible` whose score is not -inf, which may be none.
 */
ALWAYS_INLINE void softmax_row(float *scores, int num_visible, int num_scores, int dim,
                               float *max, float *sum, float *output, multiplier *weights)
{
    for (int key = num_visible < 0 ? 0 : num_visible; key < num_scores; key++)
        scores[key] = -INFINITY;
    vec maxima = splat(*max);
    for (int key = 0; key < num_scores; key += LANES) {
        const vec some = load_f32(scores + key);
        maxima = either(some > maxima, some, maxima);
    }
    float highest = *max;
    for (int lane = 0; lane < LANES; lane++)
        highest = maxima[lane] > highest ? maxima[lane] : highest;
    if (highest > *max) {
        const float scale = expf(*max - highest);
        for (int i = 0; i < dim; i++)
            output[i] *= scale;
        *sum *= scale;
        *max = highest;
    }
    if (highest == -INFINITY) /* nothing seen so far; scores less this would be no numbers */
        highest = 0;
    vec sums = {0};
    for (int key = 0; key < num_scores; key += LANES) {
        const vec some = exp_nonpositive(load_f32(scores + key) - highest);
        store_multipliers(weights + key, some);
        sums += some;
    }
    for (int lane = 0; lane < LANES; lane++)
        *sum += sums[lane];
}

/* A group of rows against the tile of keys that starts at `first_key`; `rows` and `vectors` are constants. */
ALWAYS_INLINE void attend_group(const int rows, const int vectors, const Shape *shape, float scale, float soft_cap,
                                int window, const int32_t *table,
                                int first_key, int num_context, /* of the tile; of the item, to prefetch within */
                                const int *num_visible,                     /* [rows] keys of the tile each row sees */
                                const element *keys, const element *values, /* at the KV head */
                                const multiplier *query,                    /* [dim / PAIR, rows, PAIR] */
                                float *max, float *sum,                     /* [rows] */
                                float *output)                              /* [rows, dim] */
{
    const int dim = shape->head_dim, block_size = shape->block_size;
    const int64_t block_stride = (int64_t)shape->num_kv_heads * dim * block_size;
    const int num_keys = min_int(num_visible[rows - 1], TILE_KEYS); /* later rows see more */
    const int strip = vectors * LANES;
    float scores[GROUP_ROWS * TILE_KEYS] __attribute__((aligned(64)));
    multiplier weights[GROUP_ROWS * TILE_KEYS] __attribute__((aligned(64)));
    int done = 0;

    for (; done < num_keys; done += strip) {
        const int key = first_key + done;
        if (block_size % strip == 0) {
            const int64_t page = table[key / block_size] * block_stride;
            const int place = key % block_size;
            score_keys(rows, vectors, dim, scale, query, keys + page + place * PAIR, block_size * PAIR, scores + done,
                       values + page + place * dim);
        } else { /* the strip spans blocks: bring its keys together first */
            element packed[dim * strip];
            memset(packed, 0, sizeof packed);
            for (int k = 0; k < min_int(strip, num_keys - done); k++) {
                const element *page = keys + table[(key + k) / block_size] * block_stride;
                page += (key + k) % block_size * PAIR;
                for (int i = 0; i < dim; i++)
                    packed[(i / PAIR * strip + k) * PAIR + i % PAIR] = page[i / PAIR * block_size * PAIR + i % PAIR];
            }
            score_keys(rows, vectors, dim, scale, query, packed, strip * PAIR, scores + done, packed);
        }
    }
    for (int r = 0; r < rows; r++) {
        float *row = scores + r * TILE_KEYS;
        if (soft_cap > 0 || num_visible[r] > window)
            cap_and_hide(row, done, soft_cap, num_visible[r] - window);
        softmax_row(row, num_visible[r], done, dim, max + r, sum + r, output + r * dim, weights + r * TILE_KEYS);
    }
    for (int run, start = 0; start < num_keys; start += run) {
        const int key = first_key + start, place = key % block_size;
        const element *page = values + table[key / block_size] * block_stride + place * dim;
        const int next = min_int(key + TILE_KEYS, num_context - 1);
        const element *ahead = keys + table[next / block_size] * block_stride;
        int column = 0;
        run = min_int(block_size - place, num_keys - start);
        for (; column + strip <= dim; column += strip)
            weigh_values(rows, vectors, dim, run, weights + start, page + column * PAIR, output + column,
                         ahead + column * run);
        for (; column < dim; column += LANES) /* head_dim is a multiple of 16 */
            weigh_values(rows, 1, dim, run, weights + start, page + column * PAIR, output + column,
                         ahead + column * run);
    }
}

static void attend_item(const Shape *shape, const Step *step, int item, int kv_head, float scale, float soft_cap,
                        int window, const element *qkv, const element *keys, const element *values, element *output)
{
    const int dim = shape->head_dim, sharing = shape->num_heads / shape->num_kv_heads; /* query heads per KV head */
    const int row = step->item_rows[item], first = step->item_tokens[item], end = step->query_starts[row + 1];
    const int num_tokens = min_int(shape->tokens_per_item, end - first), num_rows = num_tokens * sharing;
    const int first_visible = step->context_lens[row] - (end - first) + 1; /* keys that the first token sees */
    const int num_keys = first_visible + num_tokens - 1;
    const int first_needed = first_visible > window ? first_visible - window : 0; /* key that a token sees */
    const int num_groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
    const int group_rows = (num_rows + num_groups - 1) / num_groups;
    const int64_t width = (int64_t)(shape->num_heads + 2 * shape->num_kv_heads) * dim;
    const int64_t head_offset = (int64_t)kv_head * dim * shape->block_size;
    const int32_t *table = step->block_tables + (int64_t)row * step->max_blocks;
    multiplier query[num_rows * dim]; /* per group: [dim / PAIR, rows of the group, PAIR] */
    float sums[num_rows * dim], max[num_rows], sum[num_rows];

    for (int r = 0; r < num_rows; r++) {
        const element *source = qkv + (first + r / sharing) * width + (kv_head * sharing + r % sharing) * dim;
        const int group = r / group_rows, rows = min_int(group_rows, num_rows - group * group_rows);
        multiplier *target = query + group * group_rows * dim + r % group_rows * PAIR;
        for (int i = 0; i < dim; i++)
            target[i / PAIR * rows * PAIR + i % PAIR] = multiplier_of(source[i]);
        max[r] = -INFINITY;
        sum[r] = 0;
    }
    memset(sums, 0, sizeof sums);

    for (int first_key = first_needed - first_needed % TILE_KEYS; first_key < num_keys; first_key += TILE_KEYS)
        for (int r = 0; r < num_rows; r += group_rows) {
            const int rows = min_int(group_rows, num_rows - r);
            int num_visible[GROUP_ROWS];
            for (int i = 0; i < rows; i++)
                num_visible[i] = first_visible + (r + i) / sharing - first_key;
            if (num_visible[rows - 1] <= 0)
                continue;
#define ATTEND(rows, vectors)                                                                                          \
    attend_group(rows, vectors, shape, scale, soft_cap, window, table, first_key, num_keys, num_visible,               \
                 keys + head_offset, values + head_offset, query + r * dim, max + r, sum + r, sums + r * dim)
            /* Few rows leave registers for more keys, which makes for longer runs of memory. */
            switch (shape->block_size % (4 * LANES) == 0 ? rows : rows + GROUP_ROWS) {
                case 1: ATTEND(1, 4); break;
                case 2: ATTEND(2, 4); break;
                case 3: ATTEND(3, 4); break;
                case GROUP_ROWS + 1: ATTEND(1, 2); break;
                case GROUP_ROWS + 2: ATTEND(2, 2); break;
                case GROUP_ROWS + 3: ATTEND(3, 2); break;
                case 4: case GROUP_ROWS + 4: ATTEND(4, 2); break;
                case 5: case GROUP_ROWS + 5: ATTEND(5, 2); break;
                case 6: case GROUP_ROWS + 6: ATTEND(6, 2); break;
            }
#undef ATTEND
        }

    for (int r = 0; r < num_rows; r++) {
        const int head = kv_head * sharing + r % sharing;
        element *target = output + ((int64_t)(first + r / sharing) * shape->num_heads + head) * dim;
        const float inverse = 1.0f / sum[r];
        for (int i = 0; i < dim; i++)
            target[i] = narrow(sums[r * dim + i] * inverse);
    }
}

/*
 * Causal attention of every token of the step to its own sequence, after `rope_and_store`: to the `window` keys that end
 * with its own. Where `soft_cap` is positive a score becomes soft_cap * tanh(score / soft_cap).
 */
void paged_attention(const Shape *shape, const Step *step, float scale, float soft_cap, int32_t window,
                     const element *qkv, /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] */
                     const element *keys, const element *values, /* the cache of this layer */
                     element *output)                            /* [num_tokens, num_heads * head_dim] */
{
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(shape->num_threads)
    for (int item = 0; item < step->num_items; item++)
        for (int kv_head = 0; kv_head < shape->num_kv_heads; kv_head++)
            attend_item(shape, step, item, kv_head, scale, soft_cap, window, qkv, keys, values, output);
}

/* -------- matrix products -------- */

#ifndef ELEMENT_BF16 /* those in bf16 are oneDNN's, where the CPU multiplies it */
/*
 * output = x . weight^T + bias. A weight is packed in panels of PANEL outputs, [num_panels, num_inputs, PANEL], so that
 * one is read from front to back; where outputs end it has zeros.
 *
 * A tile is GROUP_ROWS rows times a panel, whose sums fill the registers as they do above. A thread takes some panels,
 * as many at a time as its L2 cache holds beside other things, and all rows for these: so a weight comes from memory
 * once, and the inputs of a tile's rows stay in L1 for all panels of the block. Meanwhile it prefetches what stands in
 * the place of each panel next: the rest of its inputs, or the next block.
 *
 * Inputs are summed DEPTH at a time, and then these sums, which keeps more digits than one long sum and the inputs of a
 * tile within L1.
 */
#define PANEL (2 * LANES)
#define DEPTH 512
#define BLOCK_BYTES (128 << 10)
#define CHUNK 8 /* inputs between prefetches */
#define LINE 16 /* numbers in a cache line */

const int32_t panel = PANEL;

void pack_weight(const float *weight, /* [num_outputs, num_inputs] */
                 float *packed, int64_t num_outputs, int64_t num_inputs, int num_threads)
{
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t i = 0; i < num_panels; i++)
        for (int64_t input = 0; input < num_inputs; input++)
            for (int64_t j = 0; j < PANEL; j++) {
                const int64_t place = i * PANEL + j;
                packed[(i * num_inputs + input) * PANEL + j] =
                    place < num_outputs ? weight[place * num_inputs + input] : 0.0f;
            }
}

/* output = before + x . panel. `rows` is a constant wherever this is inlined. */
ALWAYS_INLINE void multiply_tile(const int rows, int64_t depth,
                                 const float *x, int64_t x_stride,           /* [rows, depth] */
                                 const float *weight,                        /* [depth, PANEL] */
                                 const float *before, int64_t before_stride, /* [rows, PANEL] */
                                 float *output, int64_t output_stride,       /* likewise; may be the same */
                                 const float *ahead, int64_t lines) /* to prefetch, `lines` of them for each CHUNK */
{
    vec sums[GROUP_ROWS * 2] = {{0}};
    const float *x3 = x + 3 * x_stride; /* a second base makes for shorter addresses */
    while (depth > 0) {
        const int64_t count = min_long(depth, CHUNK);
        for (int64_t line = 0; line < lines; line++)
            __builtin_prefetch(ahead + line * LINE);
        ahead += lines * LINE;
#pragma GCC unroll 1 /* unrolled, -ffast-math makes trees of the sums, for which there are no registers */
        for (int64_t i = 0; i < count; i++) {
            const vec low = load_f32(weight), high = load_f32(weight + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const float factor = r < 3 ? x[r * x_stride + i] : x3[(r - 3) * x_stride + i];
                sums[r * 2] += factor * low;
                sums[r * 2 + 1] += factor * high;
            }
            weight += PANEL;
        }
        x += count, x3 += count, depth -= count;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            store_f32(output + r * output_stride + v * LANES,
                      sums[r * 2 + v] + load_f32(before + r * before_stride + v * LANES));
}

/* A tile of which `num_outputs` columns are wanted; `bias` starts its sums, else what `output` has. */
static void multiply_some(int rows, int64_t num_outputs, int64_t depth, const float *x, int64_t x_stride,
                          const float *weight, const float *bias, float *output, int64_t output_stride,
                          const float *ahead, int64_t lines)
{
    float whole[GROUP_ROWS * PANEL], *to = output;
    int64_t stride = output_stride;
    if (num_outputs < PANEL) {
        to = whole, stride = PANEL;
        for (int r = 0; r < rows && !bias; r++)
            memcpy(whole + r * PANEL, output + r * output_stride, num_outputs * sizeof(float));
    }
    const float *before = bias ? bias : to;
    const int64_t before_stride = bias ? 0 : stride;
#define MULTIPLY(rows)                                                                                                 \
    multiply_tile(rows, depth, x, x_stride, weight, before, before_stride, to, stride, ahead, lines)
    switch (rows) {
        case 1: MULTIPLY(1); break;
        case 2: MULTIPLY(2); break;
        case 3: MULTIPLY(3); break;
        case 4: MULTIPLY(4); break;
        case 5: MULTIPLY(5); break;
        case 6: MULTIPLY(6); break;
    }
#undef MULTIPLY
    if (num_outputs < PANEL)
        for (int r = 0; r < rows; r++)
            memcpy(output + r * output_stride, whole + r * PANEL, num_outputs * sizeof(float));
}

/* How many of the threads divide the panels, so that the slowest has least to do; the others divide the rows. */
static int64_t threads_for_panels(int64_t num_panels, int64_t num_groups, int64_t num_threads)
{
    int64_t best = 1, least = INT64_MAX;
    for (int64_t threads = num_threads; threads > 0; threads--) {
        if (num_threads % threads)
            continue;
        const int64_t others = num_threads / threads;
        const int64_t most = ((num_panels + threads - 1) / threads) * ((num_groups + others - 1) / others);
        if (most < least)
            best = threads, least = most;
    }
    return best;
}

/* See above. `bias` has zeros where there is none, as many as the panels have outputs. */
void linear(const float *x,      /* [num_rows, num_inputs] */
            const float *packed, /* by `pack_weight` */
            const float *bias,   /* [num_panels * PANEL] */
            float *output,       /* [num_rows, num_outputs] */
            int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int num_threads)
{
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL, num_groups = (num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
    const int64_t num_depths = (num_inputs + DEPTH - 1) / DEPTH;
    const int64_t depth = ((num_inputs + num_depths - 1) / num_depths + CHUNK - 1) / CHUNK * CHUNK;
    const int64_t most_panels = 1 + BLOCK_BYTES / (depth * PANEL * (int64_t)sizeof(float));
    const int64_t of_panels = threads_for_panels(num_panels, num_groups, num_threads);
    const int64_t of_rows = num_threads / of_panels;

#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int64_t part = 0; part < num_threads; part++) {
        const int64_t column = part % of_panels, row = part / of_panels;
        const int64_t first = num_panels * column / of_panels, last = num_panels * (column + 1) / of_panels;
        const int64_t row0 = num_rows * row / of_rows, rows = num_rows * (row + 1) / of_rows - row0;
        const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
        const int64_t blocks = (last - first + most_panels - 1) / most_panels;
        for (int64_t block = 0; block < (groups ? blocks : 0); block++) {
            const int64_t from = first + (last - first) * block / blocks;
            const int64_t to = first + (last - first) * (block + 1) / blocks;
            const int64_t lines = (CHUNK * PANEL / LINE + groups - 1) / groups; /* for every group to do its part */
            for (int64_t input = 0; input < num_inputs; input += depth) {
                const int64_t inputs = min_long(num_inputs - input, depth), share = inputs / CHUNK * lines * LINE;
                const int is_last = input + inputs == num_inputs;
                for (int64_t group = 0; group < groups; group++) {
                    const int64_t top = row0 + rows * group / groups, bottom = row0 + rows * (group + 1) / groups;
                    const int is_needed = group * share < inputs * PANEL && (!is_last || to < last);
                    for (int64_t i = from; i < to; i++) {
                        const float *weight = packed + (i * num_inputs + input) * PANEL;
                        const float *next = is_last ? weight + ((to - from) * num_inputs - input) * PANEL
                                                    : weight + inputs * PANEL;
                        multiply_some(bottom - top, min_long(num_outputs - i * PANEL, PANEL), inputs,
                                      x + top * num_inputs + input, num_inputs, weight,
                                      input ? NULL : bias + i * PANEL, output + top * num_outputs + i * PANEL,
                                      num_outputs, is_needed ? next + group * share : weight, is_needed ? lines : 0);
                    }
                }
            }
        }
    }
}
#endif

/* -------- layer operations -------- */

/* Less work than this many elements is not worth waking threads for. */
#define PARALLEL_FROM 16384

/*
 * residual += delta, where there is one; output = the sum, RMS-normalised, times weight, or with `unit_offset` times
 * 1 + weight. Rounds where transformers does: the latter product is of unrounded factors.
 */
void add_rms_norm(element *restrict residual, const element *restrict delta, /* [num_rows, size]; delta may be NULL */
                  const element *restrict weight,                            /* [size] */
                  element *restrict output,                                  /* [num_rows, size] */
                  int64_t num_rows, int64_t size, float eps, int unit_offset, int num_threads)
{
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size >= PARALLEL_FROM)
    for (int64_t row = 0; row < num_rows; row++) {
        element *restrict x = residual + row * size, *restrict y = output + row * size;
        float squares = 0;
        if (delta) {
            const element *restrict d = delta + row * size;
            for (int64_t i = 0; i < size; i++)
                x[i] = narrow(widen(x[i]) + widen(d[i]));
        }
        for (int64_t i = 0; i < size; i++)
            squares += widen(x[i]) * widen(x[i]);
        const float scale = 1.0f / sqrtf(squares / size + eps);
        if (unit_offset)
            for (int64_t i = 0; i < size; i++)
                y[i] = narrow(widen(x[i]) * scale * (1.0f + widen(weight[i])));
        else
            for (int64_t i = 0; i < size; i++)
                y[i] = narrow(widen(narrow(widen(x[i]) * scale)) * widen(weight[i]));
    }
}

/* What gelu(x) ~ x * sigmoid(..) takes the sigmoid of: 2 sqrt(2 / pi) (x + 0.044715 x^3). */
#define GELU_ARGUMENT(x) ((x) * (1.5957691216f + 0.0713548162f * (x) * (x)))

/* y = silu(gate) * up, or gelu(gate) * up in its form with tanh. */
ALWAYS_INLINE void gate_row(const int is_gelu, const element *gate, const element *up, element *y, int64_t size)
{
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vec x = load(gate + i), argument = is_gelu ? GELU_ARGUMENT(x) : x;
        const vec power = exp_nonpositive(either(argument > 0.0f, -argument, argument));
        store(y + i, x * either(argument > 0.0f, splat(1.0f), power) / (1.0f + power) * load(up + i));
    }
    for (; i < size; i++) {
        const float x = widen(gate[i]), argument = is_gelu ? GELU_ARGUMENT(x) : x;
        y[i] = narrow(x / (1.0f + expf(-argument)) * widen(up[i]));
    }
}

/* output = silu(gate) * up, of rows that hold gate and up one after the other. */
void silu_mul(const element *restrict gate_up, /* [num_rows, 2 * size] */
              element *restrict output,        /* [num_rows, size] */
              int64_t num_rows, int64_t size, int num_threads)
{
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size >= PARALLEL_FROM)
    for (int64_t row = 0; row < num_rows; row++)
        gate_row(0, gate_up + row * 2 * size, gate_up + (row * 2 + 1) * size, output + row * size, size);
}

/* The same with gelu. */
void gelu_mul(const element *restrict gate_up, element *restrict output, int64_t num_rows, int64_t size,
              int num_threads)
{
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * size >= PARALLEL_FROM)
    for (int64_t row = 0; row < num_rows; row++)
        gate_row(1, gate_up + row * 2 * size, gate_up + (row * 2 + 1) * size, output + row * size, size);
}

/* -------- choice of tokens -------- */

#define STRETCH 256 /* logits that are looked at together; a multiple of LANES */

/* LANES logits from `p` on, of which `count` are there; -inf for the others. */
ALWAYS_INLINE vec load_logits(const element *p, int64_t count)
{
    if (count >= LANES)
        return load(p);
    vec x = splat(-INFINITY);
    for (int lane = 0; lane < count; lane++)
        x[lane] = widen(p[lane]);
    return x;
}

/* The highest of some logits but NaN; adds to `is_nan` where there are any. */
ALWAYS_INLINE float highest_of(const element *logits, int64_t count, ivec *is_nan)
{
    vec high = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) {
        const vec some = load_logits(logits + i, count - i);
        high = either(some > high, some, high);
        *is_nan |= some != some;
    }
    float highest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        highest = high[lane] > highest ? high[lane] : highest;
    return highest;
}

/* Whether one of some logits is at least `least`. */
static int any_from(const element *logits, int64_t count, float least)
{
    ivec ignored = {0};
    return highest_of(logits, count, &ignored) >= least;
}

/* Sum of exp((logit - highest) * factor) over those of some logits that are at least `least`. */
static double weight_of(const element *logits, int64_t count, float highest, float factor, float least)
{
    vec sums = {0};
    double weight = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        const vec some = load_logits(logits + i, count - i);
        sums += (vec)((ivec)exp_nonpositive((some - highest) * factor) & (some >= least));
    }
    for (int lane = 0; lane < LANES; lane++)
        weight += sums[lane];
    return weight;
}

/* The first highest of each row of logits; not valid where the highest is infinite or one is NaN. */
void argmax(const element *logits, /* [num_rows, vocab_size] */
            int64_t *token_ids,    /* [num_rows] */
            uint8_t *is_valid,     /* [num_rows] */
            float *maxima,         /* [num_rows] */
            int64_t num_rows, int64_t vocab_size, int num_threads)
{
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * vocab_size >= PARALLEL_FROM)
    for (int64_t row = 0; row < num_rows; row++) {
        const element *x = logits + row * vocab_size;
        float highest = -INFINITY;
        int64_t found = 0;
        ivec is_nan = {0};
        for (int64_t start = 0; start < vocab_size; start += STRETCH) {
            const int64_t count = min_long(STRETCH, vocab_size - start);
            const float high = highest_of(x + start, count, &is_nan);
            if (high > highest) {
                highest = high;
                found = start;
            }
        }
        while (found < vocab_size - 1 && widen(x[found]) != highest)
            found++;
        int nans = 0;
        for (int lane = 0; lane < LANES; lane++)
            nans |= is_nan[lane];
        token_ids[row] = found;
        maxima[row] = highest;
        is_valid[row] = !nans && highest > -INFINITY && highest < INFINITY;
    }
}

typedef struct {
    float logit;
    int32_t token_id;
} Candidate;

/* Candidates in a heap: each is higher than its two children, or as high and its token the lower number. */
static void sift_down(Candidate *heap, int64_t size, int64_t place)
{
    const Candidate moved = heap[place];
    for (int64_t child; (child = 2 * place + 1) < size; place = child) {
        const Candidate *pair = heap + child;
        if (child + 1 < size && (pair[1].logit > pair[0].logit ||
                                 (pair[1].logit == pair[0].logit && pair[1].token_id < pair[0].token_id)))
            child++;
        if (moved.logit > heap[child].logit ||
            (moved.logit == heap[child].logit && moved.token_id < heap[child].token_id))
            break;
        heap[place] = heap[child];
    }
    heap[place] = moved;
}

static void make_heap(Candidate *heap, int64_t size)
{
    for (int64_t place = size / 2; place-- > 0;)
        sift_down(heap, size, place);
}

/* The k-th highest logit, in a heap of the k highest so far whose top is the lowest: logits change their signs. */
static float kth_highest(const element *logits, int64_t vocab_size, int64_t k, Candidate *heap)
{
    for (int64_t i = 0; i < k; i++)
        heap[i] = (Candidate){-widen(logits[i]), 0};
    make_heap(heap, k);
    for (int64_t start = k; start < vocab_size; start += STRETCH) {
        const int64_t count = min_long(STRETCH, vocab_size - start);
        if (!any_from(logits + start, count, -heap->logit))
            continue;
        for (int64_t i = start; i < start + count; i++)
            if (widen(logits[i]) > -heap->logit) {
                heap->logit = -widen(logits[i]);
                sift_down(heap, k, 0);
            }
    }
    return -heap->logit;
}

/* The first token, in their order, whose cumulative weight exceeds `uniform` of the whole. */
static int64_t draw_of_all(const element *logits, int64_t vocab_size, float highest, float factor, double uniform)
{
    double weights[(vocab_size + STRETCH - 1) / STRETCH], target = 0;
    for (int64_t i = 0; i * STRETCH < vocab_size; i++) {
        const int64_t count = min_long(STRETCH, vocab_size - i * STRETCH);
        weights[i] = weight_of(logits + i * STRETCH, count, highest, factor, -INFINITY);
        target += weights[i];
    }
    target *= uniform;
    double before = 0, cumulative = 0;
    int64_t stretch = 0, found = 0;
    for (int64_t i = 0; i * STRETCH < vocab_size && cumulative <= target; i++)
        if (weights[i] > 0) {
            stretch = i;
            before = cumulative;
            cumulative += weights[i];
        }
    cumulative = before;
    const int64_t end = min_long((stretch + 1) * STRETCH, vocab_size);
    for (int64_t i = stretch * STRETCH; i < end && cumulative <= target; i += LANES) {
        const vec some = exp_nonpositive((load_logits(logits + i, end - i) - highest) * factor);
        for (int lane = 0; lane < LANES && cumulative <= target; lane++)
            if (some[lane] > 0) {
                found = i + lane;
                cumulative += some[lane];
            }
    }
    return found;
}

/* The same of the tokens that the filters leave, the most likely ones first. */
static int64_t draw_of_some(const element *logits, int64_t vocab_size, float highest, float factor, double uniform,
                            int64_t top_k, double top_p, double min_p, Candidate *candidates)
{
    float least = -INFINITY; /* logits below are not kept */
    double mass = 0;         /* of what min_p and top_k keep */
    if (min_p > 0)
        least = highest + logf(min_p) / factor;
    if (top_k < vocab_size) {
        const float kth = kth_highest(logits, vocab_size, top_k, candidates);
        least = kth > least ? kth : least;
    } else {
        for (int64_t i = 0; i < vocab_size; i += STRETCH)
            mass += weight_of(logits + i, min_long(STRETCH, vocab_size - i), highest, factor, least);
        if (top_p < 1) { /* top_p is reached before tokens that, all together, weigh less than the rest */
            const float reached = highest + logf((1 - top_p) * mass / vocab_size) / factor;
            least = reached > least ? reached : least;
        }
    }
    int64_t size = 0;
    for (int64_t start = 0; start < vocab_size; start += STRETCH) {
        const int64_t count = min_long(STRETCH, vocab_size - start);
        if (!any_from(logits + start, count, least))
            continue;
        for (int64_t i = start; i < start + count; i++)
            if (widen(logits[i]) >= least)
                candidates[size++] = (Candidate){widen(logits[i]), i};
    }
    if (top_k < vocab_size)
        for (int64_t i = 0; i < size; i++)
            mass += expf((candidates[i].logit - highest) * factor);

    /* The most likely first, from the end of the array backwards, until top_p is reached or the draw is decided. */
    const double limit = mass * (top_p < 1 ? top_p : uniform);
    double cumulative = 0;
    int64_t left = size, found = 0;
    make_heap(candidates, size);
    while (left > 0 && (top_p < 1 ? cumulative < limit : cumulative <= limit)) {
        const Candidate next = candidates[0];
        const float weight = expf((next.logit - highest) * factor);
        candidates[0] = candidates[--left];
        sift_down(candidates, left, 0);
        candidates[left] = next;
        cumulative += weight;
        if (weight > 0)
            found = next.token_id;
    }
    if (top_p >= 1)
        return found;
    const double target = uniform * cumulative;
    cumulative = 0;
    for (int64_t i = size - 1; i >= left && cumulative <= target; i--) {
        const float weight = expf((candidates[i].logit - highest) * factor);
        cumulative += weight;
        if (weight > 0)
            found = candidates[i].token_id;
    }
    return found;
}

/*
 * A token of each of some rows of logits, drawn with probability proportional to exp(logit / temperature) from what is
 * kept: weights of at least min_p times the highest, of these the top_k highest, of these those that top_p takes.
 */
void draw(const element *logits,    /* [.., vocab_size] */
          const float *maxima,      /* [..] the highest of each of these rows */
          const int64_t *places,    /* [num_rows] which of them */
          const float *temperature, /* [num_rows], and so are the others */
          const double *uniform, const int64_t *top_k, const double *top_p, const double *min_p,
          Candidate *scratch, /* [num_threads, vocab_size] */
          int64_t *token_ids, int64_t num_rows, int64_t vocab_size, int num_threads)
{
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_rows * vocab_size >= PARALLEL_FROM)
    for (int64_t row = 0; row < num_rows; row++) {
        const element *x = logits + places[row] * vocab_size;
        const float highest = maxima[places[row]], factor = 1.0f / temperature[row];
        if (top_k[row] < vocab_size || top_p[row] < 1 || min_p[row] > 0)
            token_ids[row] = draw_of_some(x, vocab_size, highest, factor, uniform[row], top_k[row], top_p[row],
                                          min_p[row], scratch + omp_get_thread_num() * vocab_size);
        else
            token_ids[row] = draw_of_all(x, vocab_size, highest, factor, uniform[row]);
    }
}
