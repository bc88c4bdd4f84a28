/* Weights in bfloat16 by scale and code: what coded.h looks up. Memory of a table is used once it is asked for, up to 4 MB of it. */
static struct {
    uint16_t q4_0[KEPT_HALVES][16], iq4_nl[KEPT_HALVES][16], q5_0[KEPT_HALVES][32], fp4[256][16];
} coded_kept __attribute__((aligned(64)));

#define CODED_KEEP(format, FORMAT, COUNT, CODES)                                                                       \
    KEEP(coded_##format, COUNT * CODES, coded_kept.format[i / CODES][i % CODES] = kept_number(FORMAT, i % CODES, i / CODES))
CODED_KEEP(q4_0, Q4_0, KEPT_HALVES, 16)
CODED_KEEP(iq4_nl, IQ4_NL, KEPT_HALVES, 16)
CODED_KEEP(q5_0, Q5_0, KEPT_HALVES, 32)
CODED_KEEP(fp4, MXFP4, 256, 16)
#undef CODED_KEEP

/* What there has to be before weights of a format are looked up. */
static void coded_have(int format)
{
    have_scales();
    if (format == Q4_0)
        have_coded_q4_0();
    else if (format == IQ4_NL)
        have_coded_iq4_nl();
    else if (format == Q5_0)
        have_coded_q5_0();
    else if (format == MXFP4 || format == MXFP4_BLOCK)
        have_coded_fp4();
}
