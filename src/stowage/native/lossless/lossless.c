/* The lossless code for floating-point numbers: a payload in fewer bytes, and back; see core/lossless.py. */

#include "../binding.h"
#include "block.h"

#include <stdlib.h>

#define HEAD 16 /* "STLC", the number of the code (u16), 0 (u16), the raw length (u64) */
#define PADDING 4096 /* fewer bytes of anything may follow the last block */

enum { WHOLE, DAMAGED, UNKNOWN };

static const uint8_t MARK[8] = {'S', 'T', 'L', 'C', 1, 0, 0, 0};
static const Steps *steps = &BASE_STEPS;

/* Returns the packed length, 0 where that is more than there is room for. */
static size_t pack_into(const uint8_t *source, size_t raw, uint8_t *target, size_t room, Scratch *scratch) {
    if (room < HEAD)
        return 0;
    uint64_t length = raw;
    memcpy(target, MARK, sizeof MARK);
    for (int i = 0; i < 8; i++)
        target[8 + i] = (uint8_t)(length >> 8 * i);
    size_t at = HEAD;
    for (size_t from = 0; from < raw; from += RAW_MAX) {
        int some = raw - from < RAW_MAX ? (int)(raw - from) : RAW_MAX;
        size_t taken = (size_t)write_block(steps, scratch, source + from, some);
        if (taken > room - at)
            return 0;
        memcpy(target + at, scratch->coded, taken);
        at += taken;
    }
    return at;
}

static int unpack_into(const uint8_t *source, size_t length, uint8_t *target, size_t raw, Scratch *scratch) {
    if (length < HEAD || memcmp(source, MARK, 4) != 0)
        return DAMAGED;
    if (memcmp(source, MARK, sizeof MARK) != 0)
        return UNKNOWN;
    uint64_t said = 0;
    for (int i = 0; i < 8; i++)
        said |= (uint64_t)source[8 + i] << 8 * i;
    if (said != raw)
        return DAMAGED;
    const uint8_t *at = source + HEAD, *end = source + length;
    for (size_t to = 0; to < raw; to += RAW_MAX) {
        int some = raw - to < RAW_MAX ? (int)(raw - to) : RAW_MAX;
        if (end - at < HEADER)
            return DAMAGED;
        uint32_t body = at[4] | (uint32_t)at[5] << 8 | (uint32_t)at[6] << 16 | (uint32_t)at[7] << 24;
        if (at[2] || at[3] || body > (size_t)(end - at) - HEADER)
            return DAMAGED;
        if (!read_block(steps, scratch, at[0], at[1], at + HEADER, at + HEADER + body, target + to, some))
            return DAMAGED;
        at += HEADER + body;
    }
    return end - at < PADDING ? WHOLE : DAMAGED;
}

/* Calls one of the two with two buffers, the second writable, without the interpreter's lock. */
static PyObject *with_buffers(PyObject *arguments, int packs) {
    Py_buffer source, target;
    if (!PyArg_ParseTuple(arguments, "y*w*", &source, &target))
        return NULL;
    size_t result = 0;
    Scratch *scratch;
    Py_BEGIN_ALLOW_THREADS
    scratch = calloc(1, sizeof(Scratch)); /* what lies beyond the last value of a group is read, and means nothing */
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

static PyObject *unpack_floats(PyObject *Py_UNUSED(self), PyObject *arguments) { return with_buffers(arguments, 0); }

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
    {"unpack_floats", unpack_floats, METH_VARARGS, "Unpacks. 0: whole, 1: damaged, 2: packed by another code."},
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
