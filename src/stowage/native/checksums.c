/* Checksums of many payloads in one call; see storage/format/batch.py.

   The hash is computed by the library in the package xxhash, which is opened here; its functions are called as its
   public header declares them (stable since 0.8.0). batch.py compares them with the package before the first use. */

#include "binding.h"

#include <dlfcn.h>

#define FIELD_BYTES 112 /* of an envelope's header: all but the digest */
#define DIGEST_BYTES 16

typedef struct {
    uint64_t low, high;
} Hash; /* XXH128_hash_t */

static void *(*make_state)(void);
static int (*free_state)(void *);
static int (*reset)(void *);
static int (*update)(void *, const void *, size_t);
static Hash (*finish)(const void *);
static int connected;

static PyObject *connect_to(PyObject *Py_UNUSED(self), PyObject *path) {
    const char *text = PyUnicode_AsUTF8(path);
    if (text == NULL)
        return NULL;
    void *library = dlopen(text, RTLD_NOW | RTLD_LOCAL); /* never closed: its functions are called from now on */
    if (library == NULL)
        Py_RETURN_FALSE;
    /* POSIX lets a function's address be taken this way, which C alone does not. */
    *(void **)&make_state = dlsym(library, "XXH3_createState");
    *(void **)&free_state = dlsym(library, "XXH3_freeState");
    *(void **)&reset = dlsym(library, "XXH3_128bits_reset");
    *(void **)&update = dlsym(library, "XXH3_128bits_update_dispatch"); /* for this processor */
    if (update == NULL)
        *(void **)&update = dlsym(library, "XXH3_128bits_update");
    *(void **)&finish = dlsym(library, "XXH3_128bits_digest");
    connected = make_state && free_state && reset && update && finish;
    return PyBool_FromLong(connected);
}

static inline void put_big_endian(uint8_t *target, uint64_t number) {
    for (int at = 7; at >= 0; at--, number >>= 8)
        target[at] = (uint8_t)number;
}

/* What a call works on. `taken`: how many payload buffers are to be released. */
typedef struct {
    Py_buffer fields, digests, *payloads;
    Py_ssize_t taken;
} Work;

static int hash_all(const Work *work, Py_ssize_t count) {
    void *state = make_state();
    if (state == NULL)
        return -1;
    int wrong = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        wrong |= reset(state);
        wrong |= update(state, (const char *)work->fields.buf + i * FIELD_BYTES, FIELD_BYTES);
        wrong |= update(state, work->payloads[i].buf, (size_t)work->payloads[i].len);
        Hash hash = finish(state);
        uint8_t *digest = (uint8_t *)work->digests.buf + i * DIGEST_BYTES;
        put_big_endian(digest, hash.high);
        put_big_endian(digest + 8, hash.low);
    }
    free_state(state);
    return wrong ? -1 : 0;
}

static PyObject *digests(PyObject *Py_UNUSED(self), PyObject *arguments) {
    PyObject *payloads;
    Work work = {.taken = 0, .payloads = NULL};
    if (!PyArg_ParseTuple(arguments, "y*O!w*", &work.fields, &PyList_Type, &payloads, &work.digests))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(payloads), bytes = 0;
    PyObject *result = NULL;
    if (!connected || work.fields.len != count * FIELD_BYTES || work.digests.len != count * DIGEST_BYTES) {
        PyErr_SetString(PyExc_ValueError, connected ? "fields or digests of another number of payloads" : "no hash");
        goto end;
    }
    work.payloads = PyMem_Malloc((size_t)(count ? count : 1) * sizeof(Py_buffer));
    if (work.payloads == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (; work.taken < count; work.taken++) {
        if (PyObject_GetBuffer(PyList_GET_ITEM(payloads, work.taken), work.payloads + work.taken, PyBUF_SIMPLE) < 0)
            goto end;
        bytes += work.payloads[work.taken].len;
    }
    int failed;
    if (bytes < BYTES_ALONE) {
        failed = hash_all(&work, count);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failed = hash_all(&work, count);
        Py_END_ALLOW_THREADS
    }
    if (failed)
        PyErr_NoMemory();
    else
        result = Py_NewRef(Py_None);
end:
    while (work.taken > 0)
        PyBuffer_Release(work.payloads + --work.taken);
    PyMem_Free(work.payloads);
    PyBuffer_Release(&work.fields);
    PyBuffer_Release(&work.digests);
    return result;
}

static PyObject *all_begin_on(PyObject *Py_UNUSED(self), PyObject *arguments) {
    PyObject *payloads;
    Py_ssize_t step;
    if (!PyArg_ParseTuple(arguments, "O!n", &PyList_Type, &payloads, &step))
        return NULL;
    if (step <= 0) {
        PyErr_SetString(PyExc_ValueError, "a step is positive");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(payloads); i++) {
        Py_buffer payload;
        if (PyObject_GetBuffer(PyList_GET_ITEM(payloads, i), &payload, PyBUF_SIMPLE) < 0)
            return NULL;
        int apart = (uintptr_t)payload.buf % (uintptr_t)step != 0;
        PyBuffer_Release(&payload);
        if (apart)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"all_begin_on", all_begin_on, METH_VARARGS, "Whether the address of each payload is a multiple of a number."},
    {"connect", connect_to, METH_O, "Takes the hash from the library at this path. Whether it has all functions."},
    {"digests", digests, METH_VARARGS, "Writes the digest of each payload behind its 112 bytes of fields."},
    {NULL, NULL, 0, NULL},
};

int add_checksums(PyObject *module) { return PyModule_AddFunctions(module, methods); }
