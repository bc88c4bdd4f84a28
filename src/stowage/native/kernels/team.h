/* A thread pool for the callers of kernels. Its helpers spin for a moment between calls, then sleep.
 *
 * A token takes some two hundred calls a tenth of a millisecond apart. OpenMP's threads sleep too early between them,
 * or spin too long and take cores from others (openmp.py), and waking one takes as long as a small matrix. A spinning
 * helper yields its core to any thread. One caller at a time has the helpers; others use OpenMP's threads. A caller
 * that has done all the work does not wait for helpers that have not begun.
 */
#ifndef STOWAGE_ENGINE_TEAM_H
#define STOWAGE_ENGINE_TEAM_H

#include "kernel.h"

#if defined(__linux__) && defined(__GNUC__)
#define TEAM 1
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { HELPERS_MAX = 255, AWAKE_NS = 300000, CLOSED = 1 << 30, ENTERED = 1 << 10 };

static struct {
    pthread_mutex_t taken; /* by the caller whose job it is */
    Share share;
    void *job;
    atomic_uint call;    /* the number of the latest job: what helpers wait for */
    atomic_uint asleep;  /* helpers that must be woken */
    atomic_int inside;   /* helpers at work, ENTERED times those that ever entered this job, CLOSED when it is done */
    atomic_int wanted;   /* helpers that this job takes */
    int helpers;
} team = {.taken = PTHREAD_MUTEX_INITIALIZER, .inside = CLOSED};

static inline void rest(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Wait until a job comes after number `seen`; its number. */
static unsigned next_call(unsigned seen)
{
    int64_t until = now_ns() + AWAKE_NS;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            unsigned call = atomic_load(&team.call);
            if (call != seen)
                return call;
            rest();
        }
        if (now_ns() > until) {
            atomic_fetch_add(&team.asleep, 1);
            syscall(SYS_futex, &team.call, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); /* no sleep if it has changed */
            atomic_fetch_sub(&team.asleep, 1);
            until = now_ns() + AWAKE_NS;
        } else
            sched_yield();
    }
}

static void *help(void *nothing)
{
    (void)nothing;
    unsigned seen = 0;
    for (;;) {
        seen = next_call(seen);
        int inside = atomic_load(&team.inside);
        while (!(inside & CLOSED) && inside / ENTERED < atomic_load(&team.wanted)
               && !atomic_compare_exchange_weak(&team.inside, &inside, inside + ENTERED + 1))
            ;
        if ((inside & CLOSED) || inside / ENTERED >= atomic_load(&team.wanted))
            continue;
        team.share(team.job); /* the helpers at work still read the job */
        atomic_fetch_sub(&team.inside, 1);
    }
    return NULL;
}

/* A forked child has the bookkeeping of the helpers, but not the threads. */
static void alone_after_fork(void)
{
    pthread_mutex_init(&team.taken, NULL);
    atomic_store(&team.inside, CLOSED);
    atomic_store(&team.asleep, 0);
    team.helpers = 0;
}

/* Start `count` helpers, or as many as the system gives. Helpers block all signals. */
static void recruit(int count)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t one; team.helpers < count && pthread_create(&one, NULL, help, NULL) == 0; team.helpers++)
        pthread_detach(one);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Do the job with up to `threads` threads, this one among them; 0 if the helpers have another job. */
static int work_together(Share share, void *job, long threads)
{
    int wanted = (int)(threads - 1 < HELPERS_MAX ? threads - 1 : HELPERS_MAX);
    if (pthread_mutex_trylock(&team.taken) != 0)
        return 0;
    if (team.helpers < wanted)
        recruit(wanted);
    team.share = share;
    team.job = job;
    atomic_store(&team.wanted, wanted);
    atomic_store(&team.inside, 0);
    atomic_fetch_add(&team.call, 1);
    if (atomic_load(&team.asleep) > 0)
        syscall(SYS_futex, &team.call, FUTEX_WAKE_PRIVATE, wanted, NULL, NULL, 0);
    share(job);
    atomic_fetch_or(&team.inside, CLOSED);
    for (int turns = 1; atomic_load(&team.inside) % ENTERED != 0; turns++)
        if (turns % 1024 != 0)
            rest();
        else
            sched_yield();
    pthread_mutex_unlock(&team.taken);
    return 1;
}
#endif

#endif
