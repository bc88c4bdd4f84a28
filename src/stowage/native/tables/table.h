/* A hash table from keys of 32 bytes to rows, which never stops to grow: no single call costs more as it gets larger.

       print = hash(key), 32 bits       0110 ...................... 101101110001
                                        directory                   home in the bucket

       directory    2^depth             more than one may lead to a bucket
       bucket       print and row, 8 bytes each; linear probing, no tombstones
       records      key, and what belongs to it; by row, in blocks that stay where they are

   A bucket that is full is split in two, and only the directory doubles, which has one pointer for some two thousand
   keys (extendible hashing: Fagin and others, 1979). Small tables have one small bucket, which grows first. A bucket
   whose keys all have one beginning of the print, which chance does not do, grows too.

   The hash is multilinear over 32-bit words, with multipliers that are as secret as those of Python's own hash: two
   keys collide with a chance of 2^-32, whoever chose them (Lemire and Kaser, "Strongly universal string hashing is
   fast", 2014).

       table.h        keys to rows                      arguments.h    of Python's calls
       rows.h         rows by owner                     rows_type.h    as a Python type
       slots.h        rows that the caller chooses      slots_type.h   as a Python type
       tables.c       both, for the module

   Nothing in these three calls Python, but to hash the seed: they run without its lock where that is worth it. */

#ifndef STOWAGE_TABLE_H
#define STOWAGE_TABLE_H

#include "../binding.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS = KEY_BYTES / 4, GROUP = 64, BITS_LEAST = 3, BITS_MAX = 30, DEPTH_MAX = 20 };
enum { NO_ROW = -1, FAILED = -2 };
enum { FEW_KEYS = 4 }; /* keys that are looked up in the table before neighbouring rows are tried */

typedef struct {
    uint64_t *entries; /* print << 32 | row + 1; 0: empty */
    uint32_t count;
    uint8_t bits, depth; /* 2^bits entries; the first `depth` bits of their prints are one */
} Bucket;

typedef struct {
    Bucket **directory;
    int64_t count; /* keys */
    int depth, depth_max, bits_max;
    char **blocks; /* of records; those of rows that are in use are there */
    int block_bits; /* 2^block_bits records each */
    size_t record_bytes;
} Table;

static uint64_t multipliers[WORDS + 1]; /* written when the module is made */

static int draw_multipliers(void) {
    for (int i = 0; i <= WORDS; i++) {
        char seed[] = {'t', 'a', 'b', 'l', 'e', (char)('0' + i)};
        PyObject *bytes = PyBytes_FromStringAndSize(seed, sizeof seed);
        Py_hash_t drawn = bytes == NULL ? -1 : PyObject_Hash(bytes);
        Py_XDECREF(bytes);
        if (drawn == -1)
            return -1;
        multipliers[i] = (uint64_t)drawn;
    }
    return 0;
}

static inline uint32_t print_of(const char *key) {
    uint32_t words[WORDS];
    memcpy(words, key, KEY_BYTES);
    uint64_t sum = multipliers[WORDS];
    for (int i = 0; i < WORDS; i++)
        sum += multipliers[i] * words[i];
    return (uint32_t)(sum >> 32);
}

static inline int equal_keys(const char *one, const char *other) {
    uint64_t left[4], right[4];
    memcpy(left, one, KEY_BYTES);
    memcpy(right, other, KEY_BYTES);
    return ((left[0] ^ right[0]) | (left[1] ^ right[1]) | (left[2] ^ right[2]) | (left[3] ^ right[3])) == 0;
}

static inline char *record_of(const Table *t, int64_t row) {
    return t->blocks[row >> t->block_bits] + (row & (((int64_t)1 << t->block_bits) - 1)) * t->record_bytes;
}

static inline Bucket *bucket_of(const Table *t, uint32_t print) {
    return t->directory[(uint64_t)print >> (32 - t->depth)];
}

static inline uint32_t mask_of(const Bucket *b) { return ((uint32_t)1 << b->bits) - 1; }
static inline uint32_t print_in(uint64_t entry) { return (uint32_t)(entry >> 32); }
static inline int64_t row_in(uint64_t entry) { return (int64_t)(uint32_t)entry - 1; }
static inline uint64_t entry_of(uint32_t print, int64_t row) { return (uint64_t)print << 32 | (uint64_t)(row + 1); }

/* Most entries of a bucket in use: four of five. */
static inline uint32_t limit_of(int bits) { return (uint32_t)(((uint64_t)4 << bits) / 5); }

/* Looking up. */

/* The entry of a key, NULL if it is absent. */
static inline uint64_t *find_entry(const Table *t, uint32_t print, const char *key) {
    const Bucket *b = bucket_of(t, print);
    uint32_t mask = mask_of(b);
    for (uint32_t at = print & mask; b->entries[at] != 0; at = (at + 1) & mask)
        if (print_in(b->entries[at]) == print && equal_keys(key, record_of(t, row_in(b->entries[at]))))
            return &b->entries[at];
    return NULL;
}

static inline int64_t find_row(const Table *t, uint32_t print, const char *key) {
    const uint64_t *entry = find_entry(t, print, key);
    return entry == NULL ? NO_ROW : row_in(*entry);
}

/* Computes the prints of at most GROUP keys, and prefetches what a look-up of each reads first. NULL: no such key.
   A cache miss takes as long as some hundred instructions, so the misses of a group overlap. */
static inline void begin_group(const Table *t, const char *const *keys, uint32_t *prints, int count) {
    for (int i = 0; i < count; i++)
        if (keys[i] != NULL) {
            prints[i] = print_of(keys[i]);
            FETCH(bucket_of(t, prints[i]));
        }
    for (int i = 0; i < count; i++)
        if (keys[i] != NULL) {
            const Bucket *b = bucket_of(t, prints[i]);
            FETCH(&b->entries[prints[i] & mask_of(b)]);
        }
}

/* Prefetches what else is read of a row that is found. */
typedef void (*FetchRow)(const void *owner, int64_t row);

/* As `begin_group`; also prefetches the record of the first entry with each key's print, most likely the key's.
   Returns its row, and NO_ROW where no entry has that print, so that the key is absent. `fetch` may be NULL. */
static inline ALWAYS void begin_group_found(const Table *t, const void *owner, FetchRow fetch, const char *const *keys,
                                     uint32_t *prints, int64_t *likely, int count) {
    begin_group(t, keys, prints, count);
    for (int i = 0; i < count; i++) {
        likely[i] = NO_ROW;
        if (keys[i] == NULL)
            continue;
        const Bucket *b = bucket_of(t, prints[i]);
        uint32_t mask = mask_of(b), at = prints[i] & mask;
        while (b->entries[at] != 0 && print_in(b->entries[at]) != prints[i])
            at = (at + 1) & mask;
        if (b->entries[at] != 0) {
            likely[i] = row_in(b->entries[at]);
            FETCH(record_of(t, likely[i]));
        }
    }
    for (int i = 0; fetch != NULL && i < count; i++)
        if (likely[i] != NO_ROW)
            fetch(owner, likely[i]);
}

/* The row of a key of such a group. The table must not have changed since. */
static inline int64_t row_of(const Table *t, uint32_t print, const char *key, int64_t likely) {
    if (likely == NO_ROW || equal_keys(key, record_of(t, likely)))
        return likely;
    return find_row(t, print, key);
}

/* Keys that were inserted together are usually looked up together, and have neighbouring rows. So the next key is
   compared with the row beside the last one found, which reads memory in order. Only if that is another key's, the
   table is searched, which costs two or three cache misses. */

/* Whether the row exists and is live: a key leads to it. */
typedef int (*IsLive)(const void *owner, int64_t row);

/* The state of looking up a list of keys: the last row, the expected distance to the next one, and how many keys to
   search for in the table next. */
typedef struct {
    int64_t last;
    int step, next;
} Way;
static const Way BEGINNING = {NO_ROW, 1, FEW_KEYS};

/* Matches the next keys with the rows beside the last one, written to `rows`. Returns how many match. */
static inline ALWAYS int follow(const Table *t, const void *owner, IsLive is_live, const Way *way, const char *const *keys,
                         int64_t *rows, int count) {
    int followed = 0;
    int64_t row = way->last == NO_ROW ? NO_ROW : way->last + way->step;
    for (; followed < count && is_live(owner, row); followed++, row += way->step) {
        if (keys[followed] == NULL || !equal_keys(keys[followed], record_of(t, row)))
            break;
        rows[followed] = row;
    }
    return followed;
}

/* Finds the rows of the next keys, at most GROUP; NO_ROW for absent ones. `fetch` may be NULL. */
static inline ALWAYS void find_group(const Table *t, const void *owner, IsLive is_live, FetchRow fetch, Way *way,
                              const char *const *keys, int64_t *rows, int count) {
    uint32_t prints[GROUP];
    int64_t likely[GROUP];
    for (int at = 0; at < count; way->last = rows[at - 1]) {
        int followed = follow(t, owner, is_live, way, keys + at, rows + at, count - at);
        at += followed;
        if (followed)
            way->next = FEW_KEYS;
        if (at == count)
            continue;
        int some = way->next < count - at ? way->next : count - at;
        begin_group_found(t, owner, fetch, keys + at, prints, likely, some);
        for (int i = 0; i < some; i++, at++)
            rows[at] = keys[at] == NULL ? NO_ROW : row_of(t, prints[i], keys[at], likely[i]);
        way->step = some > 1 && rows[at - 1] == rows[at - 2] - 1 ? -1 : 1;
        way->next = GROUP;
    }
}

/* Growing. */

static Bucket *new_bucket(int bits, int depth) {
    Bucket *b = PyMem_RawMalloc(sizeof *b);
    uint64_t *entries = PyMem_RawCalloc((size_t)1 << bits, sizeof *entries);
    if (b == NULL || entries == NULL) {
        PyMem_RawFree(b);
        PyMem_RawFree(entries);
        return NULL;
    }
    *b = (Bucket){entries, 0, (uint8_t)bits, (uint8_t)depth};
    return b;
}

static void free_bucket(Bucket *b) {
    if (b != NULL)
        PyMem_RawFree(b->entries);
    PyMem_RawFree(b);
}

/* There is room, and no entry of that key. */
static inline void add_entry(Bucket *b, uint64_t entry) {
    uint32_t mask = mask_of(b), at = print_in(entry) & mask;
    while (b->entries[at] != 0)
        at = (at + 1) & mask;
    b->entries[at] = entry;
    b->count++;
}

static int enlarge(Bucket *b) {
    if (b->bits >= BITS_MAX)
        return -1;
    Bucket *larger = new_bucket(b->bits + 1, b->depth);
    if (larger == NULL)
        return -1;
    for (uint32_t at = 0; at <= mask_of(b); at++)
        if (b->entries[at] != 0)
            add_entry(larger, b->entries[at]);
    PyMem_RawFree(b->entries);
    *b = *larger;
    PyMem_RawFree(larger);
    return 0;
}

static int double_directory(Table *t) {
    size_t length = (size_t)1 << t->depth;
    Bucket **directory = PyMem_RawMalloc(2 * length * sizeof *directory);
    if (directory == NULL)
        return -1;
    for (size_t i = 0; i < length; i++)
        directory[2 * i] = directory[2 * i + 1] = t->directory[i];
    PyMem_RawFree(t->directory);
    t->directory = directory;
    t->depth++;
    return 0;
}

/* Splits a bucket: entries whose next bit is 1 move to a new one. `print`: of any entry. */
static int split(Table *t, Bucket *b, uint32_t print) {
    if (b->depth == t->depth && double_directory(t) < 0)
        return -1;
    Bucket *zero = new_bucket(b->bits, b->depth + 1), *one = new_bucket(b->bits, b->depth + 1);
    if (zero == NULL || one == NULL) {
        free_bucket(zero);
        free_bucket(one);
        return -1;
    }
    for (uint32_t at = 0; at <= mask_of(b); at++)
        if (b->entries[at] != 0)
            add_entry(print_in(b->entries[at]) >> (31 - b->depth) & 1 ? one : zero, b->entries[at]);
    size_t width = (size_t)1 << (t->depth - b->depth); /* so many pointers lead to the bucket */
    size_t first = ((uint64_t)print >> (32 - t->depth)) & ~(width - 1);
    for (size_t i = 0; i < width; i++)
        t->directory[first + i] = i < width / 2 ? zero : one;
    free_bucket(b);
    return 0;
}

/* Inserts a key, whose record is written already. Returns its old row or NO_ROW; FAILED: no memory, no change. */
static int64_t put(Table *t, uint32_t print, int64_t row) {
    uint64_t *known = find_entry(t, print, record_of(t, row));
    if (known != NULL) {
        int64_t before = row_in(*known);
        *known = entry_of(print, row);
        return before;
    }
    Bucket *b = bucket_of(t, print);
    for (; b->count >= limit_of(b->bits); b = bucket_of(t, print))
        if ((b->bits < t->bits_max || b->depth >= t->depth_max ? enlarge(b) : split(t, b, print)) < 0)
            return FAILED;
    add_entry(b, entry_of(print, row));
    t->count++;
    return NO_ROW;
}

/* Removes an entry, and moves up displaced ones behind it, so that no probe ends before its key. */
static void take_entry(Table *t, uint32_t print, uint64_t *entry) {
    Bucket *b = bucket_of(t, print);
    uint32_t mask = mask_of(b), hole = (uint32_t)(entry - b->entries);
    for (uint32_t at = (hole + 1) & mask; b->entries[at] != 0; at = (at + 1) & mask) {
        uint32_t home = print_in(b->entries[at]) & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            b->entries[hole] = b->entries[at];
            hole = at;
        }
    }
    b->entries[hole] = 0;
    b->count--;
    t->count--;
}

/* Making and ending. */

static int make_table(Table *t, int bits_max, int depth_max, int block_bits, size_t record_bytes) {
    t->depth = 0;
    t->depth_max = depth_max;
    t->bits_max = bits_max;
    t->block_bits = block_bits;
    t->record_bytes = record_bytes;
    t->directory = PyMem_RawMalloc(sizeof *t->directory);
    Bucket *first = new_bucket(bits_max < BITS_LEAST ? bits_max : BITS_LEAST, 0);
    if (t->directory == NULL || first == NULL) {
        free_bucket(first);
        PyMem_RawFree(t->directory);
        t->directory = NULL;
        return -1;
    }
    t->directory[0] = first;
    return 0;
}

/* The bucket at `*at` of the directory; `*at` becomes where the next one begins. */
static inline Bucket *next_bucket(const Table *t, size_t *at) {
    Bucket *b = t->directory[*at];
    *at += (size_t)1 << (t->depth - b->depth);
    return b;
}

static void free_table(Table *t) {
    for (size_t at = 0; t->directory != NULL && at < (size_t)1 << t->depth;)
        free_bucket(next_bucket(t, &at));
    PyMem_RawFree(t->directory);
    t->directory = NULL;
}

/* What is wrong with the table, NULL if nothing is. Linear in the keys. */
static const char *wrong_with(const Table *t) {
    int64_t count = 0;
    for (size_t at = 0; at < (size_t)1 << t->depth;) {
        size_t first = at;
        const Bucket *b = next_bucket(t, &at);
        uint32_t in_use = 0;
        for (size_t i = first; i < at; i++)
            if (t->directory[i] != b)
                return "the directory leads to the wrong bucket";
        for (uint32_t i = 0; i <= mask_of(b); i++) {
            uint64_t entry = b->entries[i];
            if (entry == 0)
                continue;
            in_use++;
            uint32_t print = print_of(record_of(t, row_in(entry)));
            if (print != print_in(entry) || bucket_of(t, print) != b)
                return "an entry of another key";
            if (find_entry(t, print, record_of(t, row_in(entry))) != &b->entries[i])
                return "a key is there twice, or is not found";
        }
        if (in_use != b->count || in_use > limit_of(b->bits))
            return "a bucket with another number of keys";
        count += in_use;
    }
    return count == t->count ? NULL : "another number of keys";
}

#endif
