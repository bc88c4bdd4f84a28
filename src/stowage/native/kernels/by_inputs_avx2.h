/* Weights of GPTQ and AWQ with AVX2: their codes lie by inputs, so some outputs at a time are laid out as those of INT4_WORDS,
 * whose words of eight inputs are GPTQ's, and multiplied then as they are, with their bits. */
enum { AVX2_TURNED = 64 };

/* Bytes from one of these outputs to the next, such that a store to each finds room in the cache. */
static int64_t avx2_turned_row(const Linear *job)
{
    return job->inputs / 64 * 32 + 96;
}

/* Room for what `avx2_turned` makes, or NULL. */
static uint8_t *avx2_turned_room(const Linear *job)
{
    int64_t groups = (job->inputs + job->group - 1) / job->group;
    int64_t bytes = AVX2_TURNED * (avx2_turned_row(job) + groups * scale_bytes[job->kind]) + AVX2_TURNED / 2 * groups;
    return malloc((size_t)bytes);
}

/* Words of eight inputs: half bytes i of all, for each i. */
static inline ALWAYS void avx2_transpose_nibbles(__m256i v[8])
{
    UNROLLED for (int way = 0; way < 3; way++) {
        int apart = 1 << way, bits = 4 << way;
        __m256i low = _mm256_set1_epi32(way == 0 ? 0x0f0f0f0f : way == 1 ? 0x00ff00ff : 0x0000ffff);
        UNROLLED for (int i = 0; i < 8; i++) {
            if (i & apart)
                continue;
            __m256i a = v[i], b = v[i + apart];
            v[i] = _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi32(_mm256_and_si256(b, low), bits));
            v[i + apart] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(a, bits), low), _mm256_andnot_si256(low, b));
        }
    }
}

/* Inputs [8 k, 8 k + 64) of `wide` outputs whose codes are at `at`; of inputs from 8 `last` + 8 on those before again. */
static inline ALWAYS void avx2_turn_codes(int awq, const uint8_t *at, int64_t across, int64_t k, int64_t last, int64_t wide,
                                    uint8_t *to, int64_t row)
{
    uint32_t words[8][AVX2_TURNED];
    __m256i v[8], there = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)wide / 8), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (int64_t i = 0; awq && i < 8; i++) {
        const uint8_t *own = at + (k + i < last ? k + i : last) * 8 * across;
        UNROLLED for (int j = 0; j < 8; j++) {
            v[j] = _mm256_maskload_epi32((const int *)(own + j * across), there);
            FETCH_FAR(own + j * across + 64);
        }
        avx2_transpose_nibbles(v);
        UNROLLED for (int j = 0; j < 8; j++)
            _mm256_storeu_si256((__m256i *)(words[i] + 8 * j), v[awq_nibbles[j]]);
    }
    for (int64_t n = 0; n < (awq ? AVX2_TURNED : wide); n += 8) {
        UNROLLED for (int i = 0; i < 8; i++) {
            const uint8_t *own = at + (k + i < last ? k + i : last) * across + 4 * n;
            v[i] = awq ? _mm256_loadu_si256((const __m256i *)(words[i] + n)) : avx2_32(own);
            if (!awq && n % 16 == 0)
                FETCH_FAR(own + 4 * AVX2_TURNED);
        }
        avx2_transpose_words(v);
        UNROLLED for (int i = 0; i < 8; i++)
            if (!awq || 8 * i < wide)
                _mm256_storeu_si256((__m256i *)(to + (awq ? 8 * i + n / 8 : n + i) * row + 4 * k), v[i]);
    }
}

/* A layer of outputs [n, n + wide) of one, which lie in `room`. */
static Linear avx2_turned(const Linear *job, int64_t n, int64_t wide, uint8_t *room)
{
    int awq = job->format == AWQ, size = scale_bytes[job->kind];
    int64_t groups = (job->inputs + job->group - 1) / job->group, row = avx2_turned_row(job), eighth = job->outputs / 8;
    uint8_t *scales = room + AVX2_TURNED * row, *zeros = scales + AVX2_TURNED * groups * size;
    const uint8_t *at = (const uint8_t *)job->w + (awq ? n / 2 : 4 * n);
    Linear own = *job;
    for (int64_t k = 0, last = job->inputs / 8 - 1; k <= last; k += 8)
        if (awq)
            avx2_turn_codes(1, at, job->outputs / 2, k, last, wide, room, row);
        else
            avx2_turn_codes(0, at, job->outputs * 4, k, last, wide, room, row);
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t i = 0; i < wide; i++)
            memcpy(scales + (i * groups + g) * size, (const uint8_t *)job->scales + (g * job->outputs + n + i) * size, (size_t)size);
        for (int64_t i = 0; i < wide / 8; i++) {
            uint32_t from = read_word((const uint8_t *)job->zeros + 4 * (g * eighth + n / 8 + i)), word = from + GPTQ_MORE;
            for (int j = awq ? 0 : 8; j < 8; j++)
                word = (word & ~(15u << 4 * j)) | (from >> 4 * awq_nibbles[j] & 15) << 4 * j;
            memcpy(zeros + 4 * (i * groups + g), &word, 4);
        }
    }
    own.format = INT4_WORDS;
    own.w = room;
    own.w_row = row;
    own.scales = scales;
    own.zeros = zeros;
    own.tall = 1;
    own.y = (char *)job->y + n * (job->narrow ? 2 : 4);
    return own;
}

/* Outputs [begin, end), laid out and then multiplied; 0: there is no memory for it. */
static int avx2_each_turned(const Linear *job, int64_t begin, int64_t end, int (*multiply)(const Linear *, int64_t, int64_t))
{
    uint8_t *room = avx2_turned_room(job);
    int done = room != NULL;
    for (int64_t n = begin, wide; done && n < end; n += wide) {
        wide = end - n < AVX2_TURNED ? end - n : AVX2_TURNED;
        Linear own = avx2_turned(job, n, wide, room);
        done = multiply(&own, 0, wide);
    }
    free(room);
    return done;
}
