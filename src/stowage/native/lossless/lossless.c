/* The lossless code for floating-point numbers: a payload in fewer bytes, and back; see core/lossless.py. */

#include "../binding.h"
#include "payload.h"

#include <stdlib.h>

/* Calls one of the two with two buffers, the second writable, without the interpreter's lock. */
static PyObject *with_buffers(PyObject *arguments, int packs) {
    Py_buffer source, target;
    if (!PyArg_ParseTuple(arguments, "y*w*", &source, &target))
        return NULL;
    size_t result = 0;
    Scratch *scratch;
    Py_BEGIN_ALLOW_THREADS
    scratch = calloc(1, sizeof(Scratch)); /* values beyond the last one of a group are read, and ignored */
    if (scratch != NULL && packs)
        result = pack_into(source.buf, (size_t)source.len, target.buf, (size_t)target.len, scratch);
    else if (scratch != NULL)
        result = (size_t)unpack_into(source.buf, (size_t)source.len, target.buf, (size_t)target.len, scratch);
    free(scratch);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    return scratch == NULL ? PyErr_NoMemory() : PyLong_FromSize_t(result);
}

static PyObject *pack_floats(PyObject *Py_UNUSED(self), PyObject *arguments) { return with_buffers(arguments, 1); }

/* Packs payloads one behind the other, each at a multiple of `step` and into at most its `most` bytes. `lengths` gets
   their packed lengths, rounded up to `step`; 0: it does not fit. Returns 0 if there is no memory. */
static int pack_all(const Py_buffer *sources, const int64_t *most, int64_t *lengths, Py_ssize_t count, Py_ssize_t step,
                    const Py_buffer *target) {
    size_t at = 0, room = (size_t)target->len;
    Scratch *scratch = calloc(1, sizeof(Scratch));
    if (scratch == NULL)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t some = most[i] < 0 ? 0 : (size_t)most[i];
        uint8_t *to = (uint8_t *)target->buf + at;
        size_t taken = pack_into(sources[i].buf, (size_t)sources[i].len, to, some < room - at ? some : room - at, scratch);
        size_t whole = (taken + (size_t)step - 1) / (size_t)step * (size_t)step;
        if (whole > room - at)
            taken = whole = 0;
        memset(to + taken, 0, whole - taken);
        lengths[i] = (int64_t)whole;
        at += whole;
    }
    free(scratch);
    return 1;
}

static PyObject *pack_frames(PyObject *Py_UNUSED(self), PyObject *arguments) {
    PyObject *payloads;
    Py_buffer most = {0}, lengths = {0}, target = {0}, *sources = NULL;
    Py_ssize_t step, held = 0;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(arguments, "O!y*nw*w*", &PyList_Type, &payloads, &most, &step, &target, &lengths))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(payloads);
    if (step < 1 || most.len != count * 8 || lengths.len != count * 8) {
        PyErr_SetString(PyExc_ValueError, "a length for each payload");
        goto end;
    }
    sources = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    if (sources == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (; held < count; held++)
        if (PyObject_GetBuffer(PyList_GET_ITEM(payloads, held), sources + held, PyBUF_SIMPLE) != 0)
            goto end;
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = pack_all(sources, most.buf, lengths.buf, count, step, &target);
    Py_END_ALLOW_THREADS
    result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
end:
    while (held > 0)
        PyBuffer_Release(sources + --held);
    PyMem_Free(sources);
    PyBuffer_Release(&most);
    PyBuffer_Release(&target);
    PyBuffer_Release(&lengths);
    return result;
}

static PyObject *unpack_floats(PyObject *Py_UNUSED(self), PyObject *arguments) { return with_buffers(arguments, 0); }

/* Unpacks payloads that lie one behind the other, each of so many raw bytes, the last one of the rest. A payload as
   long as its raw bytes is not packed. `lengths`: of each, 8 bytes. */
static int unpack_all(const Py_buffer *source, const Py_buffer *lengths, size_t each, const Py_buffer *target) {
    size_t at = 0, to = 0, room = (size_t)target->len, end = (size_t)source->len;
    Scratch *scratch = calloc(1, sizeof(Scratch));
    if (scratch == NULL)
        return -1;
    int result = each ? WHOLE : DAMAGED;
    for (size_t i = 0; i < (size_t)lengths->len / 8 && result == WHOLE; i++) {
        uint64_t length = load64((const uint8_t *)lengths->buf + 8 * i);
        size_t raw = room - to < each ? room - to : each;
        if (raw == 0 || length > end - at)
            result = DAMAGED;
        else if (length == raw)
            memcpy((uint8_t *)target->buf + to, (const uint8_t *)source->buf + at, raw);
        else
            result = unpack_into((const uint8_t *)source->buf + at, length, (uint8_t *)target->buf + to, raw, scratch);
        at += length;
        to += raw;
    }
    free(scratch);
    return result == WHOLE && to < room ? DAMAGED : result;
}

static PyObject *unpack_frames(PyObject *Py_UNUSED(self), PyObject *arguments) {
    Py_buffer source, lengths, target;
    Py_ssize_t each;
    if (!PyArg_ParseTuple(arguments, "y*y*nw*", &source, &lengths, &each, &target))
        return NULL;
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = unpack_all(&source, &lengths, each > 0 ? (size_t)each : 0, &target);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&source);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&target);
    return result < 0 ? PyErr_NoMemory() : PyLong_FromLong(result);
}

static PyObject *use_steps(PyObject *Py_UNUSED(self), PyObject *name) {
    const char *wanted = name == Py_None ? NULL : PyUnicode_AsUTF8(name);
    if (wanted == NULL && PyErr_Occurred())
        return NULL;
    const Steps *found = wanted == NULL || strcmp(wanted, "base") == 0 ? &BASE_STEPS : NULL;
#ifdef LOSSLESS_CHOICE
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && (wanted == NULL || strcmp(wanted, "avx2") == 0))
        found = &AVX2_STEPS;
    if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2")
        && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && (wanted == NULL || strcmp(wanted, "avx512") == 0))
        found = &AVX512_STEPS;
#endif
    if (found == NULL) {
        PyErr_Format(PyExc_ValueError, "this processor has no %s", wanted);
        return NULL;
    }
    steps = found;
    return PyUnicode_FromString(found->name);
}

static PyMethodDef methods[] = {
    {"pack_floats", pack_floats, METH_VARARGS, "Packs bytes into memory. The length; 0 where there is no room for it."},
    {"pack_frames", pack_frames, METH_VARARGS, "Packs payloads one behind the other, each from a multiple of a step on."},
    {"unpack_floats", unpack_floats, METH_VARARGS, "Unpacks. 0: whole, 1: damaged, 2: packed by another code."},
    {"unpack_frames", unpack_frames, METH_VARARGS, "The same of payloads one behind the other: their lengths, raw bytes of each."},
    {"use_steps", use_steps, METH_O, "None: the best there are. Returns their name."},
    {NULL, NULL, 0, NULL},
};

int add_lossless(PyObject *module) {
#ifdef LOSSLESS_CHOICE
    make_shuffles();
#endif
    PyObject *name = use_steps(NULL, Py_None);
    Py_XDECREF(name);
    return name == NULL ? -1 : PyModule_AddFunctions(module, methods);
}
