/* Flushes memory from the processors' caches; see core/read_buffers.py. */

#include "binding.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

#define LINE 64

static int can_flush(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 23 & 1;
}

__attribute__((target("clflushopt"))) static void flush(char *at, char *end) {
    for (at -= (uintptr_t)at % LINE; at < end; at += LINE)
        _mm_clflushopt(at);
    _mm_sfence();
}
#else
static int can_flush(void) { return 0; }
static void flush(char *at, char *end) { (void)at, (void)end; }
#endif

static int can;

static PyObject *flush_from_caches(PyObject *Py_UNUSED(self), PyObject *memory) {
    Py_buffer lines;
    if (PyObject_GetBuffer(memory, &lines, PyBUF_WRITABLE) != 0)
        return NULL;
    if (can) {
        Py_BEGIN_ALLOW_THREADS
        flush(lines.buf, (char *)lines.buf + lines.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&lines);
    return PyBool_FromLong(can);
}

static PyMethodDef methods[] = {
    {"flush_from_caches", flush_from_caches, METH_O, "Flush cache lines. False: this processor has no such instruction."},
    {NULL, NULL, 0, NULL},
};

int add_caches(PyObject *module) {
    can = can_flush();
    return PyModule_AddFunctions(module, methods);
}
