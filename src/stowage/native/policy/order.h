/* Which slots are evictable, and the next victims: runs.py, and what cost.py does with runs. */

#ifndef STOWAGE_ORDER_H
#define STOWAGE_ORDER_H

#include "past.h"

/* The order. */

static inline void add_last(List *list, int32_t *before, int32_t *after, int32_t slot) {
    before[slot] = list->last;
    after[slot] = NONE;
    if (list->last != NONE)
        after[list->last] = slot;
    else
        list->first = slot;
    list->last = slot;
}

static inline void drop_from(List *list, int32_t *before, int32_t *after, int32_t slot) {
    if (before[slot] != NONE)
        after[before[slot]] = after[slot];
    else
        list->first = after[slot];
    if (after[slot] != NONE)
        before[after[slot]] = before[slot];
    else
        list->last = before[slot];
}

static void not_due(Kernel *k, int32_t slot) {
    if (k->due_before[slot] == HELD)
        return;
    drop_from(&k->due, k->due_before, k->due_after, slot);
    k->due_before[slot] = HELD;
}

static void make_due(Kernel *k, int32_t slot) {
    not_due(k, slot);
    add_last(&k->due, k->due_before, k->due_after, slot);
}

static void drop_run(Kernel *k, int32_t number) {
    Run *run = &k->runs[number];
    if (run->before != NONE)
        k->runs[run->before].after = run->after;
    else
        k->first_run[run->of_class] = run->after;
    if (run->after != NONE)
        k->runs[run->after].before = run->before;
    else
        k->last_run[run->of_class] = run->before;
    if (k->open_run[run->of_class] == number)
        k->open_run[run->of_class] = NONE;
    run->slots = (List){NONE, NONE};
    run->after = k->unused;
    k->unused = number;
}

/* The slot is in no list any more. */
static void take_out(Kernel *k, int32_t slot) {
    int32_t number = k->run_of[slot];
    if (number == OUT)
        return;
    List *list = number == HELD ? &k->held : &k->runs[number].slots;
    drop_from(list, k->before, k->after, slot);
    if (number == HELD)
        not_due(k, slot);
    else if (list->first == NONE)
        drop_run(k, number);
    k->run_of[slot] = OUT;
    k->length--;
}

static void hold(Kernel *k, int32_t slot) {
    take_out(k, slot);
    k->run_of[slot] = HELD;
    add_last(&k->held, k->before, k->after, slot);
    k->length++;
}

/* Appends a run with the present time to its class. There are as many runs as slots, so one is always free. */
static int32_t new_run(Kernel *k, int64_t of_class) {
    int32_t number = k->unused, last = k->last_run[of_class];
    Run *run = &k->runs[number];
    k->unused = run->after;
    *run = (Run){k->clock, {NONE, NONE}, last, NONE, (int32_t)of_class};
    if (last != NONE)
        k->runs[last].after = number;
    else
        k->first_run[of_class] = number;
    k->last_run[of_class] = number;
    return number;
}

/* The slots were used now; those of one class are a run. */
static void append(Kernel *k, const int64_t *slots, Py_ssize_t count) {
    for (int of_class = 0; of_class < CLASSES; of_class++)
        k->open_run[of_class] = NONE;
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t slot = (int32_t)slots[i];
        int64_t of_class = in_classes(k->of_class[slot]);
        take_out(k, slot);
        int32_t number = k->open_run[of_class];
        if (number == NONE)
            number = k->open_run[of_class] = new_run(k, of_class);
        k->run_of[slot] = number;
        add_last(&k->runs[number].slots, k->before, k->after, slot);
        k->length++;
    }
}

/* The prefix tree. */

static inline int32_t parent_of(Kernel *k, int32_t slot) {
    int64_t parent = k->parent[slot];
    if (parent < 0 || parent >= k->slots || k->serial[parent] != k->parent_serial[slot])
        return NONE;
    return (int32_t)parent;
}

/* Removes a chunk: its parent has one child less. */
static void forget(Kernel *k, int32_t slot) {
    int32_t parent = parent_of(k, slot);
    k->here[slot] = 0;
    k->serial[slot]++;
    if (parent != NONE && --k->kids[parent] == 0 && k->run_of[parent] == HELD)
        make_due(k, parent);
}

static void leave(Kernel *k, const int64_t *slots, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        take_out(k, (int32_t)slots[i]);
    for (int64_t i = 0; i < count; i++)
        forget(k, (int32_t)slots[i]);
}

/* Victims. */

/* The run with the least index among the first and the last run of each class; among equals the oldest, then that of
   the highest class. */
static int32_t least_run(Kernel *k) {
    int32_t least = NONE;
    int64_t least_index = 0, least_time = 0;
    for (int of_class = 0; of_class < CLASSES; of_class++) {
        int32_t ends[2] = {k->first_run[of_class], k->last_run[of_class]};
        for (int end = 0; end < 2 && ends[0] != NONE; end++) {
            int64_t time = k->runs[ends[end]].time;
            int64_t index = k->index[of_class * AGES + age_bucket(k->clock - time)];
            int is_less = least == NONE || index < least_index || (index == least_index && time < least_time);
            if (is_less || (index == least_index && time == least_time && k->runs[least].of_class < of_class)) {
                least = ends[end];
                least_index = index;
                least_time = time;
            }
        }
    }
    return least;
}

/* Takes slots from the front of a run, up to the first one with children other than the slot before it. */
static int64_t take_leaves(Kernel *k, int32_t number, int64_t *taken, int64_t count) {
    int64_t leaves = 0;
    int32_t parent = NONE;
    for (int32_t slot = k->runs[number].slots.first; slot != NONE && leaves < count; slot = k->after[slot]) {
        if (k->kids[slot] != (parent == slot))
            break;
        parent = parent_of(k, slot);
        taken[leaves++] = slot;
    }
    if (leaves == 0)
        hold(k, k->runs[number].slots.first);
    leave(k, taken, leaves);
    return leaves;
}

/* Takes slots from the end of a list: of those that are due, else of all that are held. */
static int64_t take_held(Kernel *k, int64_t *taken, int64_t count, int only_due) {
    int64_t some = 0;
    for (int32_t slot = only_due ? k->due.last : k->held.last; slot != NONE && some < count;
         slot = only_due ? k->due_before[slot] : k->before[slot])
        taken[some++] = slot;
    leave(k, taken, some);
    return some;
}

/* So many slots, of which there are as many or more. */
static void take_victims(Kernel *k, int64_t *taken, int64_t count) {
    int32_t run = NONE; /* the run stays the least one until it is empty: nothing is appended meanwhile */
    for (int64_t some = 0; some < count;) {
        if (k->due.last != NONE) {
            some += take_held(k, taken + some, count - some, 1);
            continue;
        }
        if (run == NONE || k->runs[run].slots.first == NONE)
            run = least_run(k);
        if (run == NONE)
            some += take_held(k, taken + some, count - some, 0);
        else
            some += take_leaves(k, run, taken + some, count - some);
    }
}

/* What a batch changes. Its slots are in `some`, in range; what else belongs to it is beside them. */

static void admit_all(Kernel *k, Py_ssize_t count) {
    const int64_t *slots = k->some, *parents = k->other;
    for (Py_ssize_t i = 0; i < count && k->remembered > 0; i++)
        FETCH(&k->known[(k->prints[i] & (uint64_t)(k->rows - 1)) * WAYS]);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t slot = slots[i];
        if (k->here[slot]) {
            forget(k, (int32_t)slot);
            count_ended(k, k->of_class[slot], k->last[slot]);
        }
    }
    k->clock += count;
    begin_epoch(k);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t slot = slots[i], at = k->remembered > 0 ? index_of(k, k->prints[i]) : NONE;
        k->print[slot] = k->prints[i];
        k->uses[slot] = 0;
        k->gap[slot] = NEVER;
        if (at != NONE) {
            const Past *past = &k->past[at];
            int64_t age = k->clock - past->last;
            k->known[at] = 0;
            k->remembered--;
            count_used(k, past->of_class, past->last);
            k->uses[slot] = (int64_t)past->uses + 1;
            k->gap[slot] = past->gap < age ? past->gap : age;
        }
        k->here[slot] = 1;
        k->serial[slot]++;
        k->kids[slot] = 0;
        k->last[slot] = k->clock;
        k->of_class[slot] = class_of(k->uses[slot], k->gap[slot]);
        count_waiting(k, k->of_class[slot]);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t parent = parents[i];
        k->parent[slots[i]] = parent;
        k->parent_serial[slots[i]] = k->serial[parent < 0 ? k->slots : parent];
        if (parent >= 0) {
            k->kids[parent]++;
            not_due(k, (int32_t)parent);
        }
    }
    append(k, slots, count);
}

static void use_all(Kernel *k, Py_ssize_t count) {
    k->clock += count;
    k->batch++;
    begin_epoch(k);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t slot = k->some[i];
        if (k->mark[slot] == k->batch)
            continue;
        k->mark[slot] = k->batch;
        count_used(k, k->of_class[slot], k->last[slot]);
        int64_t age = k->clock - k->last[slot];
        if (k->uses[slot] < INT64_MAX)
            k->uses[slot]++;
        if (age < k->gap[slot])
            k->gap[slot] = age;
        k->last[slot] = k->clock;
        k->of_class[slot] = class_of(k->uses[slot], k->gap[slot]);
        count_waiting(k, k->of_class[slot]);
    }
}

#endif
