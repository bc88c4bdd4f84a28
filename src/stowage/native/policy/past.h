/* What was learned of reuse, and the memory of evicted chunks: hazard.py and history.py, for one chunk at a time. */

#ifndef STOWAGE_PAST_H
#define STOWAGE_PAST_H

#include "kernel.h"

/* hazard.py's `age_bucket` and `class_of`, in integers. */

static inline int highest_bit(uint64_t number) { return 63 - __builtin_clzll(number); }

static inline int age_bucket(int64_t age) {
    if (age < 0)
        age = 0;
    if (age >= UINT32_MAX)
        return AGES - 1;
    uint64_t one_more = (uint64_t)age + 1;
    int bucket = highest_bit(one_more * one_more);
    return bucket < AGES ? bucket : AGES - 1;
}

static inline int64_t class_of(int64_t uses, int64_t gap) {
    if (uses <= 0)
        return 0;
    int64_t level = uses < 4 ? uses : highest_bit((uint64_t)uses) + 2;
    int64_t span = gap < 0 ? 1 : 1 + highest_bit((uint64_t)gap + 1) / 2;
    return (level < LEVELS ? level : LEVELS - 1) * SPANS + (span < SPANS ? span : SPANS - 1);
}

static inline int64_t in_classes(int64_t of_class) { return 0 <= of_class && of_class < CLASSES ? of_class : 0; }

/* What was learned: hazard.py's `Hazard`. */

static void count_ended(Kernel *k, int64_t of_class, int64_t since) {
    of_class = in_classes(of_class);
    if (since < 0)
        since = 0;
    int64_t epoch = since / k->width;
    if (epoch < k->epoch - EPOCHS + 1)
        epoch = k->epoch - EPOCHS + 1;
    k->ended[of_class * AGES + age_bucket(k->clock - since)] += 1;
    k->waiting[of_class * EPOCHS + (uint64_t)epoch % EPOCHS] -= 1;
}

static void count_used(Kernel *k, int64_t of_class, int64_t since) {
    k->used[in_classes(of_class) * AGES + age_bucket(k->clock - (since < 0 ? 0 : since))] += 1;
    count_ended(k, of_class, since);
}

/* Advances to the present epoch; epochs that leave the ring are added to the oldest one in it. */
static void begin_epoch(Kernel *k) {
    int64_t epoch = k->clock / k->width;
    int64_t number = epoch - EPOCHS > k->epoch + 1 ? epoch - EPOCHS : k->epoch + 1;
    for (; number <= epoch; number++) {
        uint64_t column = (uint64_t)number % EPOCHS, next = (column + 1) % EPOCHS;
        for (int64_t row = 0; row < CLASSES * EPOCHS; row += EPOCHS) {
            k->waiting[row + next] += k->waiting[row + column];
            k->waiting[row + column] = 0;
        }
    }
    k->epoch = epoch;
}

static inline void count_waiting(Kernel *k, int64_t of_class) {
    k->waiting[of_class * EPOCHS + (uint64_t)k->epoch % EPOCHS] += 1;
}

/* history.py's `fingerprints` of one key: its first 32 bytes, a shorter key padded with zeros. */
static uint64_t fingerprint(const char *key, Py_ssize_t bytes) {
    uint64_t words[KEY_BYTES / 8] = {0};
    memcpy(words, key, bytes < KEY_BYTES ? (size_t)bytes : KEY_BYTES);
    uint64_t mixed = words[0] * MIX[0];
    for (int column = 1; column < 4; column++)
        mixed = (mixed ^ (mixed >> 32)) * MIX[0] + words[column] * MIX[column];
    mixed = (mixed ^ (mixed >> 32)) * MIX[1];
    mixed ^= mixed >> 32;
    return mixed > 0 ? mixed : 1;
}

/* The index of a fingerprint in its row of the history; NONE if it is absent. */
static inline int64_t index_of(Kernel *k, uint64_t print) {
    int64_t first = (int64_t)(print & (uint64_t)(k->rows - 1)) * WAYS;
    for (int64_t at = first; at < first + WAYS; at++)
        if (k->known[at] == print)
            return at;
    return NONE;
}

/* The index in a row to overwrite next: an empty one, else the oldest. */
static inline int64_t oldest_index(Kernel *k, uint64_t print) {
    int64_t first = (int64_t)(print & (uint64_t)(k->rows - 1)) * WAYS, oldest = first;
    for (int64_t at = first; at < first + WAYS; at++) {
        if (k->known[at] == 0)
            return at;
        if (k->order[at] < k->order[oldest])
            oldest = at;
    }
    return oldest;
}

/* history.py's `put`, with what is known of the slots' chunks. */
static void remember(Kernel *k, const int64_t *slots, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t first = (k->print[slots[i]] & (uint64_t)(k->rows - 1)) * WAYS;
        FETCH(&k->known[first]);
        FETCH(&k->order[first]);
    }
    int64_t before = k->puts;
    for (int64_t i = 0; i < count; i++) { /* a key that is remembered already stays where it is */
        int64_t at = index_of(k, k->print[slots[i]]);
        k->other[i] = NONE;
        if (at != NONE && k->order[at] <= before) {
            k->order[at] = ++k->puts;
            k->other[i] = at;
        } else if (at == NONE) {
            FETCH(&k->past[oldest_index(k, k->print[slots[i]])]);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = slots[i], at = k->other[i];
        uint64_t print = k->print[slot];
        int was_there = at != NONE;
        if (at == NONE && index_of(k, print) == NONE) {
            int64_t oldest = oldest_index(k, print);
            was_there = k->known[oldest] != 0;
            if (!was_there || k->order[oldest] <= before) {
                at = oldest;
                k->remembered += !was_there;
                k->known[at] = print;
                k->order[at] = ++k->puts;
            }
        }
        if (at == NONE) { /* repeated, or one of too many for its row */
            count_ended(k, k->of_class[slot], k->last[slot]);
            continue;
        }
        Past *past = &k->past[at];
        if (was_there)
            count_ended(k, past->of_class, past->last);
        past->last = k->last[slot];
        past->gap = (int32_t)(k->gap[slot] < PAST_GAP_MAX ? k->gap[slot] : PAST_GAP_MAX);
        past->uses = (int16_t)(k->uses[slot] < PAST_USES_MAX ? k->uses[slot] : PAST_USES_MAX);
        past->of_class = (int16_t)k->of_class[slot];
    }
}

/* The value of each age of a class: hazard.py's `best_rate`, up to rounding.

   Each age begins as an interval of its own. An interval whose successor has a higher rate is merged with it, until
   the rates fall from one interval to the next: then no interval gains from being kept longer. */

static double widths[AGES]; /* of the buckets of age; written when the module is made */

static void best_rates(const double *hazard, double *rates) {
    double uses[AGES], time[AGES], survival[AGES];
    int top = AGES; /* the stretches are top .. AGES - 1 */
    for (int age = AGES - 1; age >= 0; age--) {
        double use = hazard[age], spent = widths[age] * (1 - hazard[age] / 2), left = 1 - hazard[age];
        for (; top < AGES && uses[top] * spent > use * time[top]; top++) {
            use += left * uses[top];
            spent += left * time[top];
            left *= survival[top];
        }
        top--;
        uses[top] = use;
        time[top] = spent;
        survival[top] = left;
        rates[age] = use / spent;
    }
}

#endif
