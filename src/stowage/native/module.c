/* The module `_native`: all compiled code of the package, each part from a source of its own. */

#include "binding.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The compiled code of Stowage; see native/__init__.py.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void) {
    int (*parts[])(PyObject *) = {add_policy,  add_tables,  add_checksums, add_copies,
                                  add_kernels, add_lossless, add_gather, add_caches, add_words};
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module != NULL && i < sizeof parts / sizeof *parts; i++)
        if (parts[i](module) < 0)
            Py_CLEAR(module);
    return module;
}
