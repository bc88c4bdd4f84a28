/* The tables of keys. table.h says what a table is. */

#include "rows_type.h"
#include "slots_type.h"

int add_tables(PyObject *module) {
    int failed = draw_multipliers() < 0 || PyModule_AddType(module, &rows_type) < 0 ||
                 PyModule_AddType(module, &slots_type) < 0;
    return -failed;
}
