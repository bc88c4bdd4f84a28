/* The module `_table`. table.h says what a table is. */

#include "rows_type.h"
#include "slots_type.h"

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_table",
    .m_doc = "Keys to rows, in C; see native.py and kernel/table.h.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__table(void) {
    if (draw_multipliers() < 0 || PyType_Ready(&rows_type) < 0 || PyType_Ready(&slots_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Rows", (PyObject *)&rows_type) < 0 ||
        PyModule_AddObjectRef(module, "Slots", (PyObject *)&slots_type) < 0)
        Py_CLEAR(module);
    return module;
}
