/* Several things done to large memory while it is near: copied, hashed, squared, added up, each byte fetched once.

   Plain functions called by `kernels/fused.py` through ctypes; nothing is allocated, and what is read has been opened. Hashes are XXH3-64, sums are those of
   `rounds/reduce.py`, bit for bit: every operation is rounded on its own, so build with -ffp-contract=off.
   For x86-64 with AVX2. Elsewhere `atoll_usable` says no, and numpy and xxhash do the same one after the other. */

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef ATOLL_SOURCE
#define ATOLL_SOURCE "" /* the SHA-256 of this file: a library of another version is not used */
#endif
#define API __attribute__((visibility("default")))

API const char *atoll_source(void) { return ATOLL_SOURCE; }

#if !defined(__x86_64__)
API int atoll_usable(void) { return 0; }
#else
#include <immintrin.h>

#define FAST __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline)) FAST

API int atoll_usable(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}

typedef __m256i words;  /* four of 64 bits */
typedef __m256 floats;  /* eight */

enum { BLOCK = 1024, STRIPE = 64, VALUES = BLOCK / 4, AHEAD = 2048 };

/* ---- XXH3-64 of more than 240 bytes: blocks of 16 stripes, each with the secret moved on by a word ---- */

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
static const uint64_t START[8] = {
    0x00000000C2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x0000000085EBCA77, 0x27D4EB2F165667C5, 0x000000009E3779B1};

/* What comes last is treated differently, so up to a block is kept until more is known, and a stripe before it. */
typedef struct {
    uint64_t lanes[8], bytes, kept;
    uint8_t before[STRIPE], last[BLOCK];
} hash;

typedef struct {
    words low, high;
} lanes;

INLINE words words_at(const void *at) { return _mm256_loadu_si256((const words *)at); }

INLINE words with_words(words lane, words data, const uint8_t *secret) {
    words keyed = _mm256_xor_si256(data, words_at(secret));
    words product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(lane, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
}

INLINE lanes with_stripe(lanes l, const uint8_t *data, const uint8_t *secret) {
    return (lanes){with_words(l.low, words_at(data), secret), with_words(l.high, words_at(data + 32), secret + 32)};
}

INLINE words scrambled(words lane, const uint8_t *secret) {
    words mixed = _mm256_xor_si256(_mm256_xor_si256(lane, _mm256_srli_epi64(lane, 47)), words_at(secret));
    words prime = _mm256_set1_epi64x(0x9E3779B1);
    words high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

INLINE lanes with_block(lanes l, const void *data) {
    for (int i = 0; i < 16; i++) l = with_stripe(l, (const uint8_t *)data + STRIPE * i, SECRET + 8 * i);
    return (lanes){scrambled(l.low, SECRET + 128), scrambled(l.high, SECRET + 160)};
}

/* The lanes after all that was kept, of which it is known now that it is not the last. Whole blocks only. */
INLINE lanes resumed(const hash *h) {
    lanes l = {words_at(h->lanes), words_at(h->lanes + 4)};
    return h->kept ? with_block(l, h->last) : l;
}

/* `data` was hashed but for what `kept_of` it is kept. */
INLINE void suspend(hash *h, lanes l, const uint8_t *data, int64_t count, int64_t kept) {
    const uint8_t *last = data + count - kept;
    memcpy(h->before, count - kept >= STRIPE ? last - STRIPE : h->last + BLOCK - STRIPE, STRIPE);
    memcpy(h->last, last, (size_t)kept);
    _mm256_storeu_si256((words *)h->lanes, l.low);
    _mm256_storeu_si256((words *)(h->lanes + 4), l.high);
    h->bytes += (uint64_t)count;
    h->kept = (uint64_t)kept;
}

INLINE int64_t kept_of(int64_t bytes) { return (bytes - 1) % BLOCK + 1; }

API void atoll_hash_start(hash *h) {
    memset(h, 0, sizeof *h);
    memcpy(h->lanes, START, sizeof START);
}

static uint64_t word_at(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Of more than 240 bytes, given in pieces that were whole blocks, all but the last. */
API FAST uint64_t atoll_hash_end(const hash *h) {
    uint8_t tail[STRIPE + BLOCK];
    memcpy(tail, h->before, STRIPE);
    memcpy(tail + STRIPE, h->last, h->kept);
    lanes l = {words_at(h->lanes), words_at(h->lanes + 4)};
    for (uint64_t i = 0; i < (h->kept - 1) / STRIPE; i++)
        l = with_stripe(l, tail + STRIPE * (i + 1), SECRET + 8 * i);
    l = with_stripe(l, tail + h->kept, SECRET + 121);
    uint64_t lane[8], sum = h->bytes * START[1];
    _mm256_storeu_si256((words *)lane, l.low);
    _mm256_storeu_si256((words *)(lane + 4), l.high);
    for (int i = 0; i < 8; i += 2)
        sum += folded(lane[i] ^ word_at(SECRET + 11 + 8 * i), lane[i + 1] ^ word_at(SECRET + 19 + 8 * i));
    sum = (sum ^ (sum >> 37)) * 0x165667919E3779F9;
    return sum ^ (sum >> 32);
}

/* ---- passes ---- */

/* Ask for memory before it is needed: processors look ahead by themselves, but not beyond the page they are in. */
INLINE void look_ahead(const void *memory) {
    uintptr_t ahead = (uintptr_t)memory + AHEAD;
    for (int line = 0; line < BLOCK; line += 64) __builtin_prefetch((const void *)(ahead + (uintptr_t)line));
}

/* Past the caches: what is written is not looked at soon, and would be fetched first only to be overwritten. */
INLINE void write_past(void *out, const void *block) {
    for (int at = 0; at < BLOCK; at += 32)
        _mm256_stream_si256((words *)((uint8_t *)out + at), words_at((const uint8_t *)block + at));
}

/* A block where nobody else can change it: what was hashed is what is used. */
INLINE const uint8_t *seized(const void *block, uint8_t *room) {
    for (int at = 0; at < BLOCK; at += 32)
        _mm256_store_si256((words *)(room + at), words_at((const uint8_t *)block + at));
    return room;
}

INLINE int can_write_past(const void *out) { return ((uintptr_t)out & 31) == 0; }

API FAST void atoll_copy(const uint8_t *data, int64_t bytes, uint8_t *out) {
    int64_t first = (int64_t)(-(uintptr_t)out & 31), at = first < bytes ? first : bytes;
    memcpy(out, data, (size_t)at);
    for (; at + BLOCK <= bytes; at += BLOCK) {
        look_ahead(data + at);
        write_past(out + at, data + at);
    }
    _mm_sfence();
    memcpy(out + at, data + at, (size_t)(bytes - at));
}

/* Copy what was received, and hash it. */
API FAST void atoll_place(hash *h, const uint8_t *data, int64_t bytes, uint8_t *out) {
    int64_t kept = kept_of(bytes), at = 0;
    int is_past = can_write_past(out);
    uint8_t room[BLOCK] __attribute__((aligned(32)));
    lanes l = resumed(h);
    for (; at < bytes - kept; at += BLOCK) {
        look_ahead(data + at);
        const uint8_t *block = seized(data + at, room);
        l = with_block(l, block);
        if (is_past)
            write_past(out + at, block);
        else
            memcpy(out + at, block, BLOCK);
    }
    _mm_sfence();
    suspend(h, l, data, bytes, kept);
    memcpy(out + at, h->last, (size_t)kept);
}

/* In float32 for a block only: short enough to keep four digits. */
INLINE double squares_of(const float *values) {
    floats sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int i = 0; i < VALUES; i += 32)
        for (int j = 0; j < 4; j++) {
            floats some = _mm256_loadu_ps(values + i + 8 * j);
            sums[j] = _mm256_add_ps(sums[j], _mm256_mul_ps(some, some));
        }
    floats sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    float each[8];
    double total = 0;
    _mm256_storeu_ps(each, sum);
    for (int i = 0; i < 8; i++) total += (double)each[i];
    return total;
}

/* The sum of squares, the hash, and a copy if there is a place for it. */
API FAST double atoll_look(hash *h, const float *values, int64_t count, uint8_t *out) {
    const uint8_t *data = (const uint8_t *)values;
    int64_t bytes = 4 * count, kept = kept_of(bytes), at = 0;
    int is_past = can_write_past(out);
    double total = 0;
    lanes l = resumed(h);
    for (; at < bytes - kept; at += BLOCK) {
        look_ahead(data + at);
        l = with_block(l, data + at);
        total += squares_of((const float *)(data + at));
        if (out && is_past)
            write_past(out + at, data + at);
        else if (out)
            memcpy(out + at, data + at, BLOCK);
    }
    _mm_sfence();
    suspend(h, l, data, bytes, kept);
    if (out) memcpy(out + at, h->last, (size_t)kept);
    for (int64_t i = 0; i < kept; i += 4) {
        float value;
        memcpy(&value, h->last + i, 4);
        total += (double)value * (double)value;
    }
    return total;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* All of it to the file from `at` on, in steps that end at multiples of `step`, each looked at first, which takes
   so many seconds. The system's number for what went wrong, or 0. */
API FAST int64_t atoll_pour(hash *h, const float *values, int64_t count, int64_t file, int64_t at, int64_t step,
                            double *squares, double *seconds) {
    for (int64_t done = 0, stop = 0; done < 4 * count;) {
        const uint8_t *data = (const uint8_t *)values;
        if (done == stop) {
            stop = done + step - (at + done) % step;
            if (stop > 4 * count) stop = 4 * count;
            double began = now();
            *squares += atoll_look(h, values + done / 4, (stop - done) / 4, NULL);
            *seconds += now() - began;
        }
        int64_t some = pwrite((int)file, data + done, (size_t)(stop - done), at + done);
        if (some == 0) return EIO;
        if (some < 0 && errno != EINTR) return errno;
        if (some > 0) done += some;
    }
    return 0;
}

/* How two arrays become one: (a * of_a + b * of_b) / divisor, or * scale if that is the same. */
typedef struct {
    float of_a, of_b, scale, divisor;
    int is_divided;
} mixture;

INLINE float mixed(const mixture *m, float a, float b) {
    float sum = a * m->of_a + b * m->of_b;
    return m->is_divided ? sum / m->divisor : sum * m->scale;
}

INLINE void mix_block(const mixture *m, const float *a, const float *b, float *out) {
    floats of_a = _mm256_set1_ps(m->of_a), of_b = _mm256_set1_ps(m->of_b);
    floats scale = _mm256_set1_ps(m->scale), divisor = _mm256_set1_ps(m->divisor);
    for (int i = 0; i < VALUES; i += 8) {
        floats left = _mm256_mul_ps(_mm256_loadu_ps(a + i), of_a), right = _mm256_mul_ps(_mm256_loadu_ps(b + i), of_b);
        floats sum = _mm256_add_ps(left, right);
        _mm256_storeu_ps(out + i, m->is_divided ? _mm256_div_ps(sum, divisor) : _mm256_mul_ps(sum, scale));
    }
}

INLINE lanes maybe_resumed(const hash *h) {
    lanes none = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    return h ? resumed(h) : none;
}

/* Mix two arrays, and hash what goes in and what comes out as far as there is a hash for it. `out` may be `a`.
   `is_done`: nobody looks at the result again soon. */
API FAST void atoll_mix(const mixture *m, const float *a, hash *of_a, const float *b, hash *of_b, int64_t count,
                        float *out, hash *of_out, int is_done) {
    int64_t bytes = 4 * count, kept = kept_of(bytes), whole = (bytes - kept) / 4;
    lanes la = maybe_resumed(of_a), lb = maybe_resumed(of_b), lo = maybe_resumed(of_out);
    int is_past = is_done && can_write_past(out);
    float result[VALUES] __attribute__((aligned(32)));
    uint8_t room_a[BLOCK] __attribute__((aligned(32))), room_b[BLOCK] __attribute__((aligned(32)));
    for (int64_t at = 0; at < whole; at += VALUES) {
        float *target = is_past ? result : out + at;
        const float *left = a + at, *right = b + at;
        look_ahead(left);
        look_ahead(right);
        if (of_a) la = with_block(la, left = (const float *)seized(left, room_a));
        if (of_b) lb = with_block(lb, right = (const float *)seized(right, room_b));
        mix_block(m, left, right, target);
        if (of_out) lo = with_block(lo, target);
        if (is_past) write_past(out + at, result);
    }
    _mm_sfence();
    if (of_a) suspend(of_a, la, (const uint8_t *)a, bytes, kept); /* before `out` takes its place */
    if (of_b) suspend(of_b, lb, (const uint8_t *)b, bytes, kept);
    const float *left = of_a ? (const float *)of_a->last : a + whole, *right = of_b ? (const float *)of_b->last : b + whole;
    for (int64_t i = 0; i < count - whole; i++) out[whole + i] = mixed(m, left[i], right[i]);
    if (of_out) suspend(of_out, lo, (const uint8_t *)out, bytes, kept);
}

/* ---- the same with what is still to be read ---- */

/* An array: in memory, or the next bytes of what is open; hashed if there is a hash for it. */
typedef struct {
    const uint8_t *values, *ready; /* all of it; or what has been received of it already, */
    int64_t ready_bytes, kind, file;
    hash *hashed;
    double seconds;    /* that it took to read */
    int64_t begin, at; /* where the bytes begin in the file, and where the window does */
    uint8_t *reserved, *window;
} source;

enum { IN_MEMORY, FROM_FILE, FROM_SOCKET, FROM_HUGE_PAGES /* of a file that will not get shorter */ };

/* What is to be done with sources, and how far it is done. */
typedef struct {
    source *from;
    int64_t sources;
    const mixture *steps; /* how each source but the first is added */
    int64_t bytes, tile;
    uint8_t *out, *rooms; /* three tiles, one after the other */
    hash *of_out;
    int64_t at, turn, got, error; /* which tile, of which source, how much of that, and why no more */
} work;

enum { HUGE = 1 << 21, WINDOW = 2 * HUGE /* mapped at a time: a tile may lie in two pages */ };
enum { DONE, INTERRUPTED, FAILED };

/* Look at a file where it lies, if there is room to. */
static void open_window(source *from) {
    if (from->kind != FROM_HUGE_PAGES) return;
    from->kind = FROM_FILE;
    from->begin = lseek((int)from->file, 0, SEEK_CUR);
    if (from->begin < 0) return;
    from->reserved = mmap(NULL, WINDOW + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (from->reserved == MAP_FAILED) return;
    from->kind = FROM_HUGE_PAGES;
    from->at = -WINDOW;
    from->window = from->reserved + (-(uintptr_t)from->reserved & (HUGE - 1));
}

static void close_window(source *from) {
    if (from->kind == FROM_HUGE_PAGES) munmap(from->reserved, WINDOW + HUGE);
}

static const uint8_t *seen(source *from, int64_t at, int64_t bytes) {
    int64_t first = from->begin + at;
    if (first + bytes > from->at + WINDOW) {
        from->at = first & -(int64_t)HUGE;
        if (mmap(from->window, WINDOW, PROT_READ, MAP_SHARED | MAP_FIXED, (int)from->file, from->at) == MAP_FAILED)
            return NULL;
    }
    return from->window + (first - from->at);
}

/* The next bytes, or some of them: how many. 0 if there are no more, or an error. */
static int64_t taken(source *from, uint8_t *room, int64_t bytes) {
    if (from->ready_bytes) {
        int64_t some = bytes < from->ready_bytes ? bytes : from->ready_bytes;
        memcpy(room, from->ready, (size_t)some);
        from->ready += some, from->ready_bytes -= some;
        return some;
    }
    return from->kind == FROM_SOCKET ? recv((int)from->file, room, (size_t)bytes, MSG_WAITALL)
                                     : read((int)from->file, room, (size_t)bytes);
}

/* Whether the room has as many of the next bytes as are wanted, those that it had among them. */
static int receive(work *w, source *from, uint8_t *room, int64_t bytes) {
    double began = now();
    int how = DONE;
    while (w->got < bytes && how == DONE) {
        errno = 0;
        int64_t some = taken(from, room + w->got, bytes - w->got);
        if (some > 0)
            w->got += some;
        else
            how = errno == EINTR ? INTERRUPTED : FAILED, w->error = errno;
    }
    from->seconds += now() - began;
    if (how == DONE) w->got = 0;
    return how;
}

/* Where the next bytes are. */
static int received(work *w, int64_t bytes, uint8_t *room, const uint8_t **data) {
    source *from = w->from + w->turn;
    *data = from->kind == IN_MEMORY ? from->values + w->at : from->kind == FROM_HUGE_PAGES ? seen(from, w->at, bytes) : room;
    if (*data == room) return receive(w, from, room, bytes);
    w->error = errno;
    return *data ? DONE : FAILED;
}

/* Do a tile: from the source that has the turn to the last one. What was done before it was interrupted is in the rooms,
   or still where it was. */
INLINE int do_tile(work *w, int64_t bytes) {
    uint8_t *out = w->out + w->at, *first_room = w->rooms, *sum = w->rooms + 2 * w->tile;
    for (; w->turn < w->sources; w->turn++) {
        int64_t turn = w->turn;
        source *from = w->from + turn;
        int is_last = turn == w->sources - 1;
        const uint8_t *data;
        int how = received(w, bytes, turn ? w->rooms + w->tile : first_room, &data);
        if (how != DONE) return how;
        if (w->sources == 1) {
            atoll_place(from->hashed, data, bytes, out);
        } else if (turn) {
            const source *first = w->from;
            const uint8_t *before = turn > 1                             ? sum
                                    : first->kind == IN_MEMORY           ? first->values + w->at
                                    : first->kind == FROM_HUGE_PAGES     ? seen(w->from, w->at, bytes)
                                                                         : first_room;
            if (!before) return FAILED;
            atoll_mix(w->steps + turn - 1, (const float *)before, turn > 1 ? NULL : first->hashed, (const float *)data,
                      from->hashed, bytes / 4, (float *)(is_last ? out : sum), is_last ? w->of_out : NULL, is_last);
        }
    }
    w->turn = 0;
    return DONE;
}

/* Place the one source, or mix all of them. After an interruption, which signals make, it goes on where it was. */
API FAST int atoll_read(work *w) {
    int how = DONE;
    for (int64_t i = 0; i < w->sources; i++) open_window(w->from + i);
    for (; w->at < w->bytes && how == DONE; w->at += how == DONE ? w->tile : 0)
        how = do_tile(w, w->bytes - w->at < w->tile ? w->bytes - w->at : w->tile);
    for (int64_t i = 0; i < w->sources; i++) close_window(w->from + i);
    return how;
}
#endif
