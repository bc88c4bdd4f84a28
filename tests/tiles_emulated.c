/* The kernels alone, compiled with tiles that are emulated, as a module of Python. */
#define TILES_EMULATED "tiles_emulated.h"
#include "../src/stowage/native/kernels/kernels.c"

static PyObject *chain(PyObject *self, PyObject *whether)
{
    (void)self;
    tiles_chained = PyObject_IsTrue(whether);
    Py_RETURN_NONE;
}

static PyMethodDef emulation[] = {
    {"chain", chain, METH_O, "Whether tiles add every product onto the result itself, which is another order."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = emulation};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    return module == NULL || add_kernels(module) < 0 ? NULL : module;
}
