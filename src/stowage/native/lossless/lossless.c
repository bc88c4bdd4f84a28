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
