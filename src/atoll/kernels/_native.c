/* The arithmetic of the codecs, compiled. The bits are those of the numpy code in `kernels.py` and `codec_blocks.py`.

   Plain functions over memory, called by `native.py` through ctypes: no Python, no library, nothing allocated. Payloads
   are little-endian and may begin at any byte. Every operation is rounded on its own: build with -ffp-contract=off. */

#include <stdint.h>
#include <string.h>

#ifndef ATOLL_SOURCE
#define ATOLL_SOURCE "" /* the SHA-256 of this file: a library of another version is not used */
#endif
#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* One build for every x86-64: the loader picks the version that the processor has. Needs the loader of glibc.
   ATOLL_BASELINE is for the tests: what a processor without AVX2 would do. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute) && !defined(ATOLL_BASELINE)
#if __has_attribute(target_clones)
#define FAST API __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef FAST
#define FAST API
#endif

#if defined(__clang__)
#define ANY_ORDER _Pragma("clang loop vectorize(assume_safety)")
#else
#define ANY_ORDER _Pragma("GCC ivdep")
#endif

/* Payloads begin anywhere, so nothing is said about where a number lies. */
typedef float f32 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint16_t u16 __attribute__((aligned(1), may_alias));

enum { NOT_A_NUMBER = 0x7FC0, SMALLEST_SCALE = 0x0480, GROUP = 2048, PIECE = 64 };

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float wide(uint16_t bits) { return float_of((uint32_t)bits << 16); }

/* The upper half of this is the nearest bfloat16, ties to even. It wraps only for NaN. */
INLINE uint32_t before_cut(uint32_t bits) { return bits + 0x7FFF + ((bits >> 16) & 1); }

API const char *atoll_source(void) { return ATOLL_SOURCE; }

/* What is done with a value that was read; always a constant where it is looked at, so that no loop asks. */
enum what { SET, ADD, ADD_TIMES };

INLINE float after(enum what what, float old, float value, float factor) {
    return what == SET ? value : what == ADD ? old + value : old + value * factor;
}

INLINE int at_most(int64_t left, int limit) { return left < limit ? (int)left : limit; }

/* Ask for memory before it is needed: processors look ahead by themselves, but not beyond the page they are in. */
INLINE void look_ahead(const void *memory, int bytes) {
    uintptr_t ahead = (uintptr_t)memory + 2048;
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch((const void *)(ahead + (uintptr_t)line));
}

INLINE void look_ahead_to_write(const void *memory, int bytes) {
    uintptr_t ahead = (uintptr_t)memory + 1024;
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch((const void *)(ahead + (uintptr_t)line), 1);
}

/* ---- bfloat16 ---- */

INLINE void write_bf16(const u32 *restrict values, int count, u16 *restrict out) {
    for (int i = 0; i < count; i++) {
        uint32_t bits = values[i];
        float value = float_of(bits);
        out[i] = (uint16_t)((value != value ? bits | 0x00400000 : before_cut(bits)) >> 16);
    }
}

INLINE void write_piece(const u32 *restrict values, u16 *restrict out) {
    look_ahead(values, 4 * PIECE);
    look_ahead_to_write(out, 2 * PIECE);
    write_bf16(values, PIECE, out);
}

/* Both halves at once: one core gets more out of memory in two places than in one. */
FAST void atoll_bf16_write(const u32 *restrict values, int64_t count, u16 *restrict out) {
    int64_t half = count / (2 * PIECE) * PIECE;
    for (int64_t at = 0; at < half; at += PIECE) {
        write_piece(values + at, out + at);
        write_piece(values + half + at, out + half + at);
    }
    write_bf16(values + 2 * half, (int)(count - 2 * half), out + 2 * half);
}

INLINE void read_bf16(enum what what, float factor, const u16 *restrict bits, int64_t count, f32 *restrict out) {
    for (int64_t i = 0; i < count; i++) out[i] = after(what, out[i], wide(bits[i]), factor);
}

FAST void atoll_bf16_read(int what, float factor, const u16 *restrict bits, int64_t count, f32 *restrict out) {
    if (what == SET) read_bf16(SET, factor, bits, count, out);
    if (what == ADD) read_bf16(ADD, factor, bits, count, out);
    if (what == ADD_TIMES) read_bf16(ADD_TIMES, factor, bits, count, out);
}

/* ---- whole multiples of a scale, one scale for each block: what int8 and int4 have in common ---- */

/* Bits of magnitudes are ordered as the magnitudes are, and NaN comes last. */
INLINE float peak_of(const f32 *restrict values, int count) {
    const u32 *bits = (const u32 *)values;
    int32_t peak = 0;
    for (int i = 0; i < count; i++) {
        int32_t magnitude = (int32_t)(bits[i] & 0x7FFFFFFF);
        peak = magnitude > peak ? magnitude : peak;
    }
    return float_of((uint32_t)peak);
}

INLINE uint16_t scale_of(float peak, float levels, float largest) {
    if (!(peak <= largest)) return NOT_A_NUMBER;
    uint32_t scale = before_cut(bits_of(peak / levels)) >> 16;
    return (uint16_t)(scale < SMALLEST_SCALE ? 0 : scale);
}

/* float32 has no fractions at 1.5 * 2^23: adding that rounds, and leaves the whole number in the low bits. */
INLINE void write_codes(const f32 *restrict values, int count, float inverse, uint8_t *restrict codes) {
    for (int i = 0; i < count; i++) codes[i] = (uint8_t)bits_of(values[i] * inverse + 12582912.0f);
}

INLINE uint16_t write_block(const f32 *restrict values, int count, float levels, float largest,
                            uint8_t *restrict codes) {
    uint16_t scale = scale_of(peak_of(values, count), levels, largest);
    if (scale == 0 || scale == NOT_A_NUMBER)
        memset(codes, 0, (size_t)count);
    else
        write_codes(values, count, 1.0f / wide(scale), codes);
    return scale;
}

INLINE void write_blocks(const f32 *restrict values, int64_t count, int block, float levels, float top,
                         u16 *restrict scales, uint8_t *restrict codes) {
    for (int64_t at = 0; at < count; at += block) {
        look_ahead(values + at, 4 * block);
        int size = at_most(count - at, block);
        if (size == block) /* the same, but the compiler knows how long it is */
            scales[at / block] = write_block(values + at, block, levels, levels * top, codes + at);
        else
            scales[at / block] = write_block(values + at, size, levels, levels * top, codes + at);
    }
}

INLINE void read_block(enum what what, float factor, const int8_t *restrict codes, int count, float scale,
                       f32 *restrict out) {
    for (int i = 0; i < count; i++) out[i] = after(what, out[i], (float)codes[i] * scale, factor);
}

INLINE void read_blocks(int what, float factor, const u16 *restrict scales, const int8_t *restrict codes,
                        int64_t count, int block, f32 *restrict out) {
    for (int64_t at = 0; at < count; at += block) {
        int size = at_most(count - at, block);
        float scale = wide(scales[at / block]);
        look_ahead(out + at, 4 * block);
        if (what == SET) read_block(SET, factor, codes + at, size, scale, out + at);
        if (what == ADD) read_block(ADD, factor, codes + at, size, scale, out + at);
        if (what == ADD_TIMES) read_block(ADD_TIMES, factor, codes + at, size, scale, out + at);
    }
}

/* ---- int8: a code is a byte ---- */

FAST void atoll_int8_write(const f32 *restrict values, int64_t count, u16 *restrict scales, uint8_t *restrict codes) {
    write_blocks(values, count, 256, 127.0f, 0x1.02p+121f, scales, codes);
}

FAST void atoll_int8_read(int what, float factor, const u16 *restrict scales, const int8_t *restrict codes,
                          int64_t count, f32 *restrict out) {
    read_blocks(what, factor, scales, codes, count, 256, out);
}

/* ---- int4: two codes in a byte, one of the first and one of the second half of a group ---- */

INLINE void join(const uint8_t *restrict codes, int count, uint8_t *restrict packed) {
    int half = (count + 1) / 2, pairs = count / 2;
    for (int j = 0; j < pairs; j++) packed[j] = (uint8_t)((codes[j] & 0x0F) | (codes[half + j] << 4));
    if (pairs < half) packed[pairs] = codes[pairs] & 0x0F;
}

INLINE void part(const uint8_t *restrict packed, int count, int8_t *restrict codes) {
    int half = (count + 1) / 2, pairs = count / 2;
    for (int j = 0; j < half; j++) codes[j] = (int8_t)(((packed[j] & 0x0F) ^ 8) - 8);
    for (int j = 0; j < pairs; j++) codes[half + j] = (int8_t)(((packed[j] >> 4) ^ 8) - 8);
}

FAST void atoll_int4_write(const f32 *restrict values, int64_t count, u16 *restrict scales, uint8_t *restrict packed) {
    uint8_t codes[GROUP];
    for (int64_t at = 0; at < count; at += GROUP) {
        int size = at_most(count - at, GROUP);
        write_blocks(values + at, size, 128, 7.0f, 0x1.24p+125f, scales + at / 128, codes);
        join(codes, size, packed + at / 2);
    }
}

FAST void atoll_int4_read(int what, float factor, const u16 *restrict scales, const uint8_t *restrict packed,
                          int64_t count, f32 *restrict out) {
    int8_t codes[GROUP];
    for (int64_t at = 0; at < count; at += GROUP) {
        int size = at_most(count - at, GROUP);
        part(packed + at / 2, size, codes);
        read_blocks(what, factor, scales + at / 128, codes, size, 128, out + at);
    }
}

/* ---- multiply and add, rounded once: only where the processor has an instruction for it ---- */

#if defined(__x86_64__)
#define FUSED __attribute__((target("fma")))
API int atoll_has_fma(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("fma") != 0;
}
#elif defined(__FP_FAST_FMAF)
#define FUSED
API int atoll_has_fma(void) { return 1; }
#else
API int atoll_has_fma(void) { return 0; }
#endif

#ifdef FUSED
/* `out` may be `a` or `c`. */
API FUSED void atoll_fma(const f32 *a, float b, const f32 *c, int64_t count, f32 *out) {
    ANY_ORDER
    for (int64_t i = 0; i < count; i++) out[i] = __builtin_fmaf(a[i], b, c[i]);
}
#else
API void atoll_fma(const f32 *a, float b, const f32 *c, int64_t count, f32 *out) {
    (void)a, (void)b, (void)c, (void)count, (void)out;
}
#endif
