/* Lays 4-bit codes that lie by inputs out by outputs; see weights/quantized/row_major.py.

   A word of GPTQ has eight inputs of one output, a word of AWQ one input of eight outputs. The words that are written
   have eight inputs of one output, the first in the lowest bits, and those of an output lie side by side. Whole lines
   of memory are read and written: of GPTQ a square of words, of AWQ as many words, in which half bytes are transposed
   too. Releases the interpreter's lock. */

#include "binding.h"

#include <string.h>

enum { SIDE = 16, EIGHT = 8 }; /* words in a line of memory, half bytes in a word */

typedef struct {
    const uint32_t *from;
    uint32_t *to;
    int64_t inputs, outputs;
} Words;

static const int awq_place[EIGHT] = {0, 4, 1, 5, 2, 6, 3, 7}; /* of each output in its word */

/* Word i becomes half bytes i of all eight, for each of the words side by side. */
static inline void transpose_nibbles(uint32_t v[EIGHT][SIDE]) {
    static const uint32_t low[3] = {0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
    for (int way = 0; way < 3; way++) {
        int apart = 1 << way, bits = 4 << way;
        for (int i = 0; i < EIGHT; i++)
            for (int j = 0; j < SIDE && !(i & apart); j++) {
                uint32_t moved = (v[i][j] >> bits ^ v[i + apart][j]) & low[way];
                v[i + apart][j] ^= moved;
                v[i][j] ^= moved << bits;
            }
    }
}

/* Outputs from n on, `wide` of them (at most SIDE), and `deep` words of each from word k on. */
static void lay_gptq(const Words *words, int64_t n, int64_t wide, int64_t k, int64_t deep) {
    uint32_t square[SIDE][SIDE];
    for (int64_t i = 0; i < deep; i++)
        memcpy(square[i], words->from + (k + i) * words->outputs + n, (size_t)wide * 4);
    for (int64_t j = 0; j < wide; j++) {
        uint32_t *to = words->to + (n + j) * (words->inputs / EIGHT) + k;
        for (int64_t i = 0; i < deep; i++)
            to[i] = square[i][j];
    }
}

/* The same; at most SIDE times eight outputs. */
static void lay_awq(const Words *words, int64_t n, int64_t wide, int64_t k, int64_t deep) {
    uint32_t square[EIGHT][SIDE][SIDE]; /* of each of eight outputs */
    for (int64_t i = 0; i < deep; i++) {
        uint32_t v[EIGHT][SIDE] = {{0}};
        for (int64_t input = 0; input < EIGHT; input++)
            memcpy(v[input], words->from + ((k + i) * EIGHT + input) * (words->outputs / EIGHT) + n / EIGHT, (size_t)wide / 2);
        transpose_nibbles(v);
        for (int o = 0; o < EIGHT; o++)
            memcpy(square[o][i], v[awq_place[o]], sizeof v[0]);
    }
    for (int64_t j = 0; j < wide; j++) {
        uint32_t *to = words->to + (n + j) * (words->inputs / EIGHT) + k;
        for (int64_t i = 0; i < deep; i++)
            to[i] = square[j % EIGHT][i][j / EIGHT];
    }
}

static PyObject *words_by_outputs(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t given) {
    int64_t value[7];
    if (!takes("words_by_outputs", given, 7) || read_numbers(arguments, given, value) < 0)
        return NULL;
    Words words = {address(value[0]), address(value[1]), value[2], value[3]};
    int awq = value[4] != 0;
    int64_t begin = value[5], end = value[6], tall = awq ? SIDE * EIGHT : SIDE, row = words.inputs / EIGHT;
    if (begin < 0 || end > words.outputs || words.inputs % EIGHT || (awq && (begin | end) % EIGHT)) {
        PyErr_SetString(PyExc_ValueError, "words of eight codes are laid out, and outputs that there are");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t n = begin; n < end; n += tall)
        for (int64_t k = 0; k < row; k += SIDE) {
            int64_t wide = end - n < tall ? end - n : tall, deep = row - k < SIDE ? row - k : SIDE;
            (awq ? lay_awq : lay_gptq)(&words, n, wide, k, deep);
        }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"words_by_outputs", FAST(words_by_outputs), METH_FASTCALL,
     "Lays words of 4-bit codes out by outputs: from, to, inputs, outputs, whether they are AWQ's, begin, end."},
    {NULL, NULL, 0, NULL},
};

int add_words(PyObject *module) { return PyModule_AddFunctions(module, methods); }
