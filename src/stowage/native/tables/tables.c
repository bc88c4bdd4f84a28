/* The tables of keys. table.h says what a table is. */

#include "rows_type.h"
#include "slots_type.h"

int add_tables(PyObject *module) {
    if (draw_multipliers() < 0 || PyType_Ready(&rows_type) < 0 || PyType_Ready(&slots_type) < 0)
        return -1;
    if (PyModule_AddObjectRef(module, "Rows", (PyObject *)&rows_type) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Slots", (PyObject *)&slots_type);
}
