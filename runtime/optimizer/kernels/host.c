/* AdamW, sums of squares and sums of gradients for a CPU, each in one pass over memory.
 *
 * Results have the same bits as in runtime/optimizer/adamw.py and blockwise.py, which define the
 * arithmetic. The loops are simple, so the compiler can vectorize them. The compiler must keep IEEE
 * arithmetic as written: without -ffast-math and without fused multiply-adds. Data needs only the
 * alignment of its type. Blocks do not depend on each other. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "shares.h"

enum {
    TILE = 4096,    /* elements that are updated and then copied. They have 106 KB, so the copy
                       reads from the L2 cache. */
    ROW = 4096,     /* elements of a row in a sum of squares */
    RATIO_ROW = 64, /* elements of a row in a sum of g^2 / v */
};

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bf16(uint16_t high) { return from_bits((uint32_t)high << 16); }

/* The scalars of adamw.py in the order of its Scalars, rounded from double to float. */
typedef struct {
    float decay, beta1, rest1, beta2, rest2, root_scale, epsilon, rate, shrink, unbias, floor;
} Scalars;

/* Updates one weight: returns the new master and writes the new moments. */
static inline float step(float master, float *first, float *second, float g, float clip,
                         float scale, const Scalars s) {
    g = g * clip;
    master = master * s.decay;
    const float m = *first * s.beta1 + g * s.rest1;
    const float v = *second * s.beta2 + (g * g) * s.rest2;
    *first = m;
    *second = v;
    return master - (m * s.rate * scale) / (sqrtf(v) * s.root_scale + s.epsilon);
}

#define PLANES(NAME, GRADIENT, WIDEN)                                                             \
    static void NAME(int64_t count, uint16_t *restrict high, uint16_t *restrict low,              \
                     float *restrict first, float *restrict second,                               \
                     const GRADIENT *restrict gradient, float clip, float scale,                  \
                     const Scalars s) {                                                           \
        for (int64_t i = 0; i < count; i++) {                                                     \
            const uint32_t residual = (uint32_t)(int32_t)(int16_t)low[i];                         \
            const float master = from_bits(((uint32_t)high[i] << 16) + residual);                 \
            const uint32_t bits =                                                                 \
                to_bits(step(master, first + i, second + i, WIDEN(gradient[i]), clip, scale, s)); \
            low[i] = (uint16_t)bits;                                                              \
            high[i] = (uint16_t)((bits + 0x8000u) >> 16);                                         \
        }                                                                                         \
    }

#define SINGLE(NAME, GRADIENT, WIDEN)                                                        \
    static void NAME(int64_t count, float *restrict weights, float *restrict first,          \
                     float *restrict second, const GRADIENT *restrict gradient, float clip,  \
                     float scale, const Scalars s) {                                         \
        for (int64_t i = 0; i < count; i++)                                                  \
            weights[i] =                                                                     \
                step(weights[i], first + i, second + i, WIDEN(gradient[i]), clip, scale, s); \
    }

PLANES(planes_bf16, uint16_t, from_bf16)
PLANES(planes_fp32, float, )
SINGLE(single_bf16, uint16_t, from_bf16)
SINGLE(single_fp32, float, )

typedef struct {
    void *weights;
    uint16_t *low; /* null: fp32 weights */
    float *first, *second;
    const void *gradient;
    int gradient_is_fp32;
    float clip, scale;
    void *copy; /* may be null */
    Scalars scalars;
} Update;

static void update(const void *call, int64_t from, int64_t end) {
    const Update u = *(const Update *)call;
    const int64_t width = u.low ? 2 : 4, gradient_width = u.gradient_is_fp32 ? 4 : 2;
    for (int64_t start = from; start < end; start += TILE) {
        const int64_t length = least(end - start, TILE);
        char *const w = (char *)u.weights + width * start;
        const void *const g = (const char *)u.gradient + gradient_width * start;
        float *const m = u.first + start, *const v = u.second + start;
        if (u.low && u.gradient_is_fp32)
            planes_fp32(length, (uint16_t *)w, u.low + start, m, v, g, u.clip, u.scale, u.scalars);
        else if (u.low)
            planes_bf16(length, (uint16_t *)w, u.low + start, m, v, g, u.clip, u.scale, u.scalars);
        else if (u.gradient_is_fp32)
            single_fp32(length, (float *)w, m, v, g, u.clip, u.scale, u.scalars);
        else
            single_bf16(length, (float *)w, m, v, g, u.clip, u.scale, u.scalars);
        if (u.copy)
            memcpy((char *)u.copy + width * start, w, width * length);
    }
}

/* Does one AdamW update. If `low` is null, the weights are fp32. If `clip` or `scale` is null, the
 * factor is 1, which changes no bit. If `copy` is not null, it receives the new weights. If a
 * factor is NaN, nothing changes. */
void megatrain_adamw(Team *team, int64_t count, void *weights, uint16_t *low, float *first,
                     float *second, const void *gradient, int gradient_is_fp32, const float *clip,
                     const float *scale, void *copy, const Scalars *scalars) {
    Update u = {weights,
                low,
                first,
                second,
                gradient,
                gradient_is_fp32,
                clip ? *clip : 1.0f,
                scale ? *scale : 1.0f,
                copy,
                *scalars};
    if (u.clip != u.clip || u.scale != u.scale)
        return;
    if (scale)
        u.scalars.decay = 1.0f - u.scale * u.scalars.shrink;
    in_shares(team, count, update, &u);
}

enum {
    BLOCK = 32,         /* parameters of a record */
    RECORD = BLOCK + 2, /* bytes of a record: the codes, then their scale in bf16 */
    LARGEST = 0x7B00,   /* 2^119 in bf16: 254 times a larger value might be infinite */
    SMALLEST = 0x0080,  /* the smallest normal bf16 */
    NOT_A_NUMBER = 0x7FC0,
};

static inline uint16_t scale_of(const uint8_t *record) {
    uint16_t bits;
    memcpy(&bits, record + BLOCK, sizeof bits);
    return bits;
}

/* Returns the scale of a record, its largest absolute value rounded up, as the bits of a bf16.
 * `most` has the bits of this value as a float. */
static inline uint16_t scale_bits(uint32_t most) {
    most = (most + 0xFFFFu) >> 16;
    return most > LARGEST ? NOT_A_NUMBER : most < SMALLEST ? 0 : most;
}

/* Writes the scale of a record. If the scale is 0 or NaN, also sets all codes to 0. */
static inline void put_scale(uint8_t *record, uint16_t scale) {
    memcpy(record + BLOCK, &scale, sizeof scale);
    if (scale == 0 || scale == NOT_A_NUMBER)
        memset(record, 0, BLOCK);
}

static inline void get_second(const uint8_t *record, float *second) {
    const float unit = from_bf16(scale_of(record)) * (float)(1.0 / 255);
    for (int i = 0; i < BLOCK; i++) {
        const float root = (float)record[i] * unit;
        second[i] = root * root;
    }
}

/* Writes 16 random bits for each parameter of the block that begins at parameter `start`: numbers
 * start / 4 to start / 4 + 7 of a SplitMix64 generator whose state before number 0 is `state`. */
static inline void random_bits(uint64_t state, int64_t start, uint16_t *bits) {
    uint64_t words[BLOCK / 4];
    for (int i = 0; i < BLOCK / 4; i++) {
        uint64_t word = state + ((uint64_t)start / 4 + i + 1) * 0x9E3779B97F4A7C15u;
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
        word = (word ^ word >> 27) * 0x94D049BB133111EBu;
        words[i] = word ^ word >> 31;
    }
    memcpy(bits, words, sizeof words); /* little endian */
}

/* A NaN stays a NaN. An addition could turn it into another number. */
static inline uint32_t add_unless_nan(uint32_t bits, uint32_t random) {
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? (uint32_t)NOT_A_NUMBER << 16 : bits + random;
}

static inline int32_t between(int32_t value, int32_t lowest, int32_t highest) {
    value = value > lowest ? value : lowest;
    return value < highest ? value : highest;
}

/* Updates one record. `for_master` and `for_second` are random bits. Floats are clamped as integers
 * and rounded by an addition, because compilers generate many more instructions for a selection of
 * floats or for a conversion. */
#define RECORDS(NAME, HAS_LOW, GRADIENT, WIDEN)                                                  \
    static void NAME(uint16_t *restrict high, int8_t *restrict low, uint8_t *restrict one,       \
                     uint8_t *restrict two, const GRADIENT *restrict gradient,                   \
                     const uint16_t *restrict for_master, const uint16_t *restrict for_second,   \
                     float clip, float scale, const Scalars s) {                                 \
        const float unit = from_bf16(scale_of(one));                                             \
        const float root_unit = from_bf16(scale_of(two)) * (float)(1.0 / 255);                   \
        float first[BLOCK], root[BLOCK];                                                         \
        uint32_t most = 0, most_root = 0;                                                        \
        for (int i = 0; i < BLOCK; i++) {                                                        \
            const float code = (float)(int8_t)one[i], coded_root = (float)two[i] * root_unit;    \
            const float g = WIDEN(gradient[i]) * clip;                                           \
            const float m = code * unit / (254.0f - fabsf(code)) * s.beta1 + g * s.rest1;        \
            const float r = sqrtf(coded_root * coded_root * s.beta2 + (g * g) * s.rest2);        \
            const uint32_t residual = HAS_LOW ? (uint32_t)(int32_t)low[i] << 8 : 0;              \
            const float master = from_bits(((uint32_t)high[i] << 16) + residual) * s.decay -     \
                                 (m * s.rate * scale) / (r * s.root_scale + s.epsilon);          \
            const uint32_t random = HAS_LOW ? for_master[i] & 0xFFu : for_master[i];             \
            const uint32_t rounded = add_unless_nan(to_bits(master), random);                    \
            if (HAS_LOW)                                                                         \
                low[i] = (int8_t)(uint8_t)(rounded >> 8);                                        \
            high[i] = (uint16_t)((rounded + (HAS_LOW ? 0x8000u : 0)) >> 16);                     \
            first[i] = m;                                                                        \
            root[i] = r;                                                                         \
            const uint32_t size = to_bits(m) & 0x7FFFFFFFu, root_size = to_bits(r) & 0x7FFFFFFFu; \
            most = size > most ? size : most;                                                    \
            most_root = root_size > most_root ? root_size : most_root;                           \
        }                                                                                        \
        const uint16_t first_scale = scale_bits(most), root_scale = scale_bits(most_root);       \
        const float to = from_bf16(first_scale), inverse = 255.0f / from_bf16(root_scale);       \
        for (int i = 0; i < BLOCK; i++) {                                                        \
            const float companded = first[i] * 254.0f / (to + fabsf(first[i]));                  \
            const float exact = (float)for_second[i] * 0x1p-16f + root[i] * inverse;             \
            const int32_t limited = between((int32_t)to_bits(exact), ONE, MOST_CODES);           \
            const int32_t code = (int32_t)from_bits((uint32_t)limited);                          \
            one[i] = (uint8_t)to_bits(companded + 12582912.0f); /* 1.5 * 2^23 */                 \
            two[i] = (uint8_t)between((int32_t)to_bits(root[i]), 0, code);                       \
        }                                                                                        \
        put_scale(one, first_scale);                                                             \
        put_scale(two, root_scale);                                                              \
    }

enum { ONE = 0x3F800000, MOST_CODES = 0x437F0000 }; /* 1 and 255 as bits of a float */

RECORDS(wide_bf16, 1, uint16_t, from_bf16)
RECORDS(wide_fp32, 1, float, )
RECORDS(narrow_bf16, 0, uint16_t, from_bf16)
RECORDS(narrow_fp32, 0, float, )

typedef struct {
    uint16_t *weights;
    int8_t *low; /* null: weights are the whole masters */
    uint8_t *first, *second;
    const void *gradient;
    int gradient_is_fp32;
    float clip, scale;
    uint16_t *copy; /* may be null */
    Scalars scalars;
    uint64_t weights_state, second_state;
} BlockwiseUpdate;

static void blockwise_update(const void *call, int64_t from, int64_t end) {
    const BlockwiseUpdate u = *(const BlockwiseUpdate *)call;
    const int64_t width = u.gradient_is_fp32 ? 4 : 2;
    for (int64_t start = from; start < end; start += BLOCK) {
        uint16_t *const high = u.weights + start;
        int8_t *const low = u.low ? u.low + start : NULL;
        uint8_t *const one = u.first + start / BLOCK * RECORD;
        uint8_t *const two = u.second + start / BLOCK * RECORD;
        const void *const g = (const char *)u.gradient + width * start;
        uint16_t a[BLOCK], b[BLOCK];
        random_bits(u.weights_state, start, a);
        random_bits(u.second_state, start, b);
        if (low && u.gradient_is_fp32)
            wide_fp32(high, low, one, two, g, a, b, u.clip, u.scale, u.scalars);
        else if (low)
            wide_bf16(high, low, one, two, g, a, b, u.clip, u.scale, u.scalars);
        else if (u.gradient_is_fp32)
            narrow_fp32(high, low, one, two, g, a, b, u.clip, u.scale, u.scalars);
        else
            narrow_bf16(high, low, one, two, g, a, b, u.clip, u.scale, u.scalars);
        if (u.copy)
            memcpy(u.copy + start, high, sizeof(uint16_t) * BLOCK);
    }
}

/* Does one AdamW update of whole blocks whose moments are records. `weights_state` and
 * `second_state` are the states of the random generators before the first parameter, for stochastic
 * rounding of masters and of second moments. If `low` is null, the weights are the whole masters.
 * The other arguments are those of `megatrain_adamw`. */
void megatrain_blockwise_adamw(Team *team, int64_t count, uint16_t *weights, int8_t *low,
                               uint8_t *first, uint8_t *second, const void *gradient,
                               int gradient_is_fp32, const float *clip, const float *scale,
                               uint16_t *copy, const Scalars *scalars, uint64_t weights_state,
                               uint64_t second_state) {
    BlockwiseUpdate u = {weights,
                         low,
                         first,
                         second,
                         gradient,
                         gradient_is_fp32,
                         clip ? *clip : 1.0f,
                         scale ? *scale : 1.0f,
                         copy,
                         *scalars,
                         weights_state,
                         second_state};
    if (u.clip != u.clip || u.scale != u.scale)
        return;
    if (scale)
        u.scalars.decay = 1.0f - u.scale * u.scalars.shrink;
    in_shares(team, count, blockwise_update, &u);
}

#define SQUARES(NAME, GRADIENT, WIDEN)                                   \
    static void NAME(const GRADIENT *restrict g, float *restrict sums) { \
        for (int i = 0; i < ROW / 2; i++) {                              \
            const float a = WIDEN(g[i]), b = WIDEN(g[i + ROW / 2]);      \
            sums[i] = a * a + b * b;                                     \
        }                                                                \
    }

SQUARES(squares_bf16, uint16_t, from_bf16)
SQUARES(squares_fp32, float, )

static void halves_fp32(const float *restrict g, float *restrict sums) {
    for (int i = 0; i < ROW / 2; i++)
        sums[i] = g[i] + g[i + ROW / 2];
}

static void halves_bf16(const uint16_t *restrict g, float *restrict sums) {
    for (int i = 0; i < ROW / 2; i++)
        sums[i] = from_bf16(g[i]) + from_bf16(g[i + ROW / 2]);
}

typedef struct {
    int64_t count;
    const void *gradient;
    int gradient_is_fp32, square;
    float *row_sums;
} RowSums;

static void row_sums(const void *call, int64_t from, int64_t end) {
    const RowSums r = *(const RowSums *)call;
    const int64_t width = r.gradient_is_fp32 ? 4 : 2;
    float sums[ROW / 2]; /* 8 KB on the stack, and 16 KB for `last` */
    union {
        uint16_t bf16[ROW];
        float fp32[ROW];
    } last;
    for (int64_t start = from; start < end; start += ROW) {
        const void *row = (const char *)r.gradient + width * start;
        if (r.count - start < ROW) {
            memset(&last, 0, sizeof last);
            memcpy(&last, row, width * (r.count - start));
            row = &last;
        }
        if (r.gradient_is_fp32)
            (r.square ? squares_fp32 : halves_fp32)(row, sums);
        else
            (r.square ? squares_bf16 : halves_bf16)(row, sums);
        /* two loops, because in the second a half may be shorter than a vector */
        for (int half = ROW / 4; half >= 16; half /= 2)
            for (int i = 0; i < half; i++)
                sums[i] += sums[i + half];
        for (int half = 8; half >= 1; half /= 2)
            for (int i = 0; i < half; i++)
                sums[i] += sums[i + half];
        r.row_sums[start / ROW] = sums[0];
    }
}

/* Writes the sum of each row of 4096 elements, or with `square` the sum of their squares. Rows are
 * summed by halving. The last row is padded with zeros. */
void megatrain_row_sums(Team *team, int64_t count, const void *gradient, int gradient_is_fp32,
                        int square, float *sums) {
    const RowSums r = {count, gradient, gradient_is_fp32, square, sums};
    in_shares(team, count, row_sums, &r);
}

#define RATIOS(NAME, GRADIENT, WIDEN)                                                            \
    static void NAME(const GRADIENT *restrict gradient, const float *restrict second,            \
                     float *restrict ratios, const Scalars s) {                                  \
        for (int i = 0; i < RATIO_ROW; i++) {                                                    \
            const float g = WIDEN(gradient[i]);                                                  \
            const float square = g * g, v = (second[i] * s.beta2 + square * s.rest2) * s.unbias; \
            ratios[i] = square / (v < s.floor ? s.floor : v); /* NaN stays NaN */                \
        }                                                                                        \
    }

RATIOS(ratios_bf16, uint16_t, from_bf16)
RATIOS(ratios_fp32, float, )

typedef struct {
    const void *gradient;
    int gradient_is_fp32;
    const void *second; /* fp32, or records if coded */
    int coded;
    float *sums;
    Scalars scalars;
} RatioSums;

static void ratio_sums(const void *call, int64_t from, int64_t end) {
    const RatioSums r = *(const RatioSums *)call;
    float ratios[RATIO_ROW], decoded[RATIO_ROW];
    for (int64_t start = from; start < end; start += RATIO_ROW) {
        const float *second = (const float *)r.second + start;
        if (r.coded) {
            const uint8_t *const records = (const uint8_t *)r.second + start / BLOCK * RECORD;
            for (int i = 0; i < RATIO_ROW / BLOCK; i++)
                get_second(records + i * RECORD, decoded + i * BLOCK);
            second = decoded;
        }
        if (r.gradient_is_fp32)
            ratios_fp32((const float *)r.gradient + start, second, ratios, r.scalars);
        else
            ratios_bf16((const uint16_t *)r.gradient + start, second, ratios, r.scalars);
        for (int half = RATIO_ROW / 2; half >= 1; half /= 2)
            for (int i = 0; i < half; i++)
                ratios[i] += ratios[i + half];
        r.sums[start / RATIO_ROW] = ratios[0];
    }
}

/* Writes the sum of g^2 / max(v, floor) over each row of 64 elements, by halving. v is the
 * bias-corrected second moment after this step. `second`, the second moment before the step, is
 * fp32, or records if `coded`. `count` must be a multiple of 64. */
void megatrain_ratio_sums(Team *team, int64_t count, const void *gradient, int gradient_is_fp32,
                          const void *second, int coded, float *sums, const Scalars *scalars) {
    const RatioSums r = {gradient, gradient_is_fp32, second, coded, sums, *scalars};
    in_shares(team, count, ratio_sums, &r);
}

/* Writes the sum of `count` values to sums[0], by halving, and overwrites the other values. `count`
 * must be a power of two. */
void megatrain_fold(int64_t count, float *sums) {
    for (int64_t half = count / 2; half >= 1; half /= 2)
        for (int64_t i = 0; i < half; i++)
            sums[i] += sums[i + half];
}

typedef struct {
    float *total;
    const void *gradient;
    int gradient_is_fp32, first;
} Addition;

static void widen(int64_t count, float *restrict total, const uint16_t *restrict gradient) {
    for (int64_t i = 0; i < count; i++)
        total[i] = from_bf16(gradient[i]);
}

static void add_bf16(int64_t count, float *restrict total, const uint16_t *restrict gradient) {
    for (int64_t i = 0; i < count; i++)
        total[i] += from_bf16(gradient[i]);
}

static void add_fp32(int64_t count, float *restrict total, const float *restrict gradient) {
    for (int64_t i = 0; i < count; i++)
        total[i] += gradient[i];
}

static void add(const void *call, int64_t start, int64_t end) {
    const Addition a = *(const Addition *)call;
    float *const total = a.total + start;
    const int64_t count = end - start;
    if (a.gradient_is_fp32 && a.first)
        memcpy(total, (const float *)a.gradient + start, sizeof *total * count);
    else if (a.gradient_is_fp32)
        add_fp32(count, total, (const float *)a.gradient + start);
    else
        (a.first ? widen : add_bf16)(count, total, (const uint16_t *)a.gradient + start);
}

/* Copies a bf16 or fp32 `gradient` to the fp32 `total` if `first`, and otherwise adds it. */
void megatrain_accumulate(Team *team, int64_t count, float *total, const void *gradient,
                          int gradient_is_fp32, int first) {
    const Addition a = {total, gradient, gradient_is_fp32, first};
    in_shares(team, count, add, &a);
}
