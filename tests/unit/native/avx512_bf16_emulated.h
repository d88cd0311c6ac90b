/* AVX-512's bf16 instructions in plain C, so that what kernels.c does with them runs on any x86 CPU. For tests. */
#include <immintrin.h>
#include <stdint.h>

#define __AVX512BF16__ 1
#define LANES 16
typedef float emulated_floats __attribute__((vector_size(64)));
typedef uint32_t emulated_pairs __attribute__((vector_size(64)));
typedef uint16_t emulated_halves __attribute__((vector_size(32)));
#define __m512 emulated_floats
#define __m512bh emulated_pairs
#define __m256i emulated_halves
#define _mm512_set1_epi32(x) ((emulated_pairs){0} + (uint32_t)(x))
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_cvtneps_pbh emulated_narrow
#define _mm256_storeu_si256 emulated_store

static inline emulated_floats emulated_dpbf16(emulated_floats sum, emulated_pairs x, emulated_pairs y)
{
    const uint32_t high = 0xffff0000;
    return sum + (emulated_floats)(x << 16) * (emulated_floats)(y << 16)
        + (emulated_floats)(x & high) * (emulated_floats)(y & high);
}

static inline emulated_halves emulated_narrow(emulated_floats x)
{
    const emulated_pairs bits = (emulated_pairs)x;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, emulated_halves);
}

static inline void emulated_store(void *p, emulated_halves x) { __builtin_memcpy(p, &x, sizeof x); }
