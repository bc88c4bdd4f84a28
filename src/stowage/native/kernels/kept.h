/* What formats look up by the few bits that it depends on: made once in a process, when it is first asked for. */
#define KEEP(name, COUNT, OF_EACH)                                                                                     \
    static void keep_##name(void)                                                                                      \
    {                                                                                                                  \
        for (int i = 0; i < COUNT; i++) {                                                                              \
            OF_EACH;                                                                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    static void have_##name(void)                                                                                      \
    {                                                                                                                  \
        static pthread_once_t once = PTHREAD_ONCE_INIT;                                                                \
        pthread_once(&once, keep_##name);                                                                              \
    }

enum { KEPT_HALVES = 1 << 16 };
static struct {
    float floats[KEPT_HALVES], powers[256]; /* of halves, and of exponents */
} kept;
KEEP(scales, KEPT_HALVES, kept.floats[i] = half_float((uint16_t)i); kept.powers[i % 256] = power_of((uint8_t)i))

/* What a code of a format means, whose numbers depend on it and on a scale of 16 or 8 bits alone; rounded to bfloat16. */
static inline uint16_t kept_number(int format, int code, int scale)
{
    float value = format == Q4_0     ? (float)(code - 8)
                  : format == Q5_0   ? (float)(code - 16)
                  : format == IQ4_NL ? (float)not_linear[code]
                                     : fp4_values[code];
    return float_half(value * (format == MXFP4 ? power_of((uint8_t)scale) : half_float((uint16_t)scale)));
}
