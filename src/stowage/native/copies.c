/* Copies many runs of bytes from one memory to another in one call; see transfer/cpu.py.

   Releases the interpreter's lock. Long work is cut into pieces, which helper threads take as the caller does. The
   caller waits for the pieces that were taken, not for helpers: one that gets no core in time finds no piece left. */

#include "binding.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES (512 << 10)       /* what a thread takes at a time, at least */
#define HELPED_BYTES (4 << 20)        /* from so many bytes on a helper is worth starting */
#define HELPERS_MAX 15
#define STACK_BYTES (256 << 10)

typedef struct {
    const char *source;
    char *target;
    const int64_t *from, *to, *bytes; /* of the runs; the caller frees them when all is taken */
    Py_ssize_t count;
} Runs;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t idle;
    Runs runs;
    Py_ssize_t run; /* the next piece begins there, `at` bytes into it */
    int64_t at;
    int under_way, users;
} Work;

/* Copies `wanted` bytes from that offset on, or what is left. */
static void copy_from(const Runs *runs, Py_ssize_t run, int64_t at, int64_t wanted) {
    while (wanted > 0 && run < runs->count) {
        int64_t length = runs->bytes[run] - at;
        if (length > wanted)
            length = wanted;
        memcpy(runs->target + runs->to[run] + at, runs->source + runs->from[run] + at, (size_t)length);
        wanted -= length;
        run++;
        at = 0;
    }
}

static void advance(Work *work, int64_t bytes) {
    while (bytes > 0 && work->run < work->runs.count) {
        int64_t left = work->runs.bytes[work->run] - work->at;
        if (left > bytes) {
            work->at += bytes;
            return;
        }
        bytes -= left;
        work->run++;
        work->at = 0;
    }
}

static void leave(Work *work) { /* the lock is held */
    int last = --work->users == 0;
    pthread_mutex_unlock(&work->lock);
    if (last) {
        pthread_mutex_destroy(&work->lock);
        pthread_cond_destroy(&work->idle);
        free(work);
    }
}

/* Takes pieces until there are none. Returns with the lock held. */
static void take_pieces(Work *work) {
    pthread_mutex_lock(&work->lock);
    while (work->run < work->runs.count) {
        Py_ssize_t run = work->run;
        int64_t at = work->at;
        advance(work, PIECE_BYTES);
        work->under_way++;
        pthread_mutex_unlock(&work->lock);
        copy_from(&work->runs, run, at, PIECE_BYTES);
        pthread_mutex_lock(&work->lock);
        if (--work->under_way == 0)
            pthread_cond_signal(&work->idle);
    }
}

static void *help(void *argument) {
    Work *work = argument;
    take_pieces(work);
    leave(work);
    return NULL;
}

static void call_helpers(Work *work, int helpers) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (int i = 0; i < helpers; i++) {
        pthread_t thread;
        pthread_mutex_lock(&work->lock);
        work->users++;
        pthread_mutex_unlock(&work->lock);
        if (pthread_create(&thread, &attributes, help, work) != 0) {
            pthread_mutex_lock(&work->lock);
            work->users--; /* the caller still is one */
            pthread_mutex_unlock(&work->lock);
            break;
        }
    }
    pthread_attr_destroy(&attributes);
}

static void copy_all(const Runs *runs, int64_t total, int threads) {
    int64_t helpers = total / HELPED_BYTES;
    if (helpers > threads - 1)
        helpers = threads - 1;
    if (helpers > HELPERS_MAX)
        helpers = HELPERS_MAX;
    Work *work = helpers > 0 ? calloc(1, sizeof(Work)) : NULL;
    if (work == NULL) {
        copy_from(runs, 0, 0, total);
        return;
    }
    pthread_mutex_init(&work->lock, NULL);
    pthread_cond_init(&work->idle, NULL);
    work->runs = *runs;
    work->users = 1;
    call_helpers(work, (int)helpers);
    take_pieces(work);
    while (work->under_way > 0)
        pthread_cond_wait(&work->idle, &work->lock);
    leave(work);
}

/* The bytes of all runs; -1 if one does not lie in its memory. */
static int64_t total_of(const Runs *runs, Py_ssize_t source_bytes, Py_ssize_t target_bytes) {
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < runs->count; i++) {
        int64_t from = runs->from[i], to = runs->to[i], bytes = runs->bytes[i];
        if (bytes < 0 || from < 0 || to < 0 || bytes > source_bytes - from || bytes > target_bytes - to)
            return -1;
        total += bytes;
    }
    return total;
}

static PyObject *copy_runs(PyObject *Py_UNUSED(self), PyObject *arguments) {
    unsigned long long source, target;
    Py_ssize_t source_bytes, target_bytes;
    Py_buffer from, to, bytes;
    int threads;
    if (!PyArg_ParseTuple(arguments, "(Kn)(Kn)y*y*y*i", &source, &source_bytes, &target, &target_bytes, &from, &to,
                          &bytes, &threads))
        return NULL;
    PyObject *result = NULL;
    Runs runs = {(const char *)(uintptr_t)source, (char *)(uintptr_t)target, from.buf, to.buf, bytes.buf,
                 bytes.len / (Py_ssize_t)sizeof(int64_t)};
    int64_t total = from.len == bytes.len && to.len == bytes.len ? total_of(&runs, source_bytes, target_bytes) : -1;
    if (total < 0) {
        PyErr_SetString(PyExc_ValueError, "runs that do not lie in their memory");
    } else if (total < BYTES_ALONE) {
        copy_from(&runs, 0, 0, total);
        result = Py_NewRef(Py_None);
    } else {
        Py_BEGIN_ALLOW_THREADS
        copy_all(&runs, total, threads);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    PyBuffer_Release(&bytes);
    return result;
}

static PyMethodDef methods[] = {
    {"copy_runs", copy_runs, METH_VARARGS, "Copies runs of bytes between two memories, each an address and a length."},
    {NULL, NULL, 0, NULL},
};

int add_copies(PyObject *module) { return PyModule_AddFunctions(module, methods); }
