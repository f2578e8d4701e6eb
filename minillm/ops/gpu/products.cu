// Matrix products and embedding with packed weights (packing.py describes their layout).
//
// Each thread computes one output for ROWS rows of x at once, so that a weight is read and unpacked once for all of
// them. Every output is one chain of fused multiply-adds over the inputs, in order, with weights widened to float32.
// The chain is the same for one row and for many, and the same for integer codes as for the float32 matrix that they
// represent.
//
// Constants: BITS, ZERO, BLOCK (inputs that share a scale), HAS_MINIMUMS; ROWS for `multiply`.

#define PER_WORD (32 / BITS)                        // weights per word
#define WORDS ((BLOCK + PER_WORD - 1) / PER_WORD)  // words per block

// Return the weight at `index` in a word.
__device__ float weight(unsigned word, int index, float scale, float minimum) {
#if BITS == 32
    return __uint_as_float(word);
#elif BITS == 16
    return __uint_as_float(index == 0 ? word << 16 : word & 0xFFFF0000u);
#else
    int code = (int)(word >> (BITS * index) & ((1u << BITS) - 1)) - ZERO;
    return HAS_MINIMUMS ? code * scale + minimum : code * scale;
#endif
}

// Compute product[row, o] = sum over k of x[row, k] * weight[o, k]. Thread block (i, j) handles outputs from i *
// blockDim.x on, for rows from j * ROWS on. All threads read the same numbers of x at once, which is as fast as one
// thread reading.
extern "C" __global__ void multiply(
    const float* __restrict__ x,           // [rows, blocks * BLOCK]
    const unsigned* __restrict__ words,    // [blocks, WORDS, outputs]
    const float* __restrict__ scales,      // [blocks, outputs], for integer codes
    const float* __restrict__ minimums,    // the same, if HAS_MINIMUMS
    int rows, int blocks, int outputs,
    float* __restrict__ product)           // [rows, outputs]
{
    const int o = blockIdx.x * blockDim.x + threadIdx.x;
    const int first = blockIdx.y * ROWS;
    if (o >= outputs) return;

    const float* row[ROWS];
    float sums[ROWS];
    for (int r = 0; r < ROWS; r++) {
        row[r] = x + (size_t)min(first + r, rows - 1) * blocks * BLOCK;  // past the last row: repeat it, without effect
        sums[r] = 0;
    }
    for (int block = 0; block < blocks; block++) {
        const float scale = BITS < 16 ? scales[(size_t)block * outputs + o] : 1;
        const float minimum = HAS_MINIMUMS ? minimums[(size_t)block * outputs + o] : 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const unsigned word = words[((size_t)block * WORDS + w) * outputs + o];
#pragma unroll
            for (int index = 0; index < PER_WORD && w * PER_WORD + index < BLOCK; index++) {
                const int k = block * BLOCK + w * PER_WORD + index;
                const float own = weight(word, index, scale, minimum);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r] = fmaf(row[r][k], own, sums[r]);
            }
        }
    }
    for (int r = 0; r < ROWS && first + r < rows; r++) product[(size_t)(first + r) * outputs + o] = sums[r];
}

// Compute rows[t, k] = weight[token_ids[t], k], one weight per thread. Thread block (t, i) handles token t, from input
// i * blockDim.x on.
extern "C" __global__ void embed(
    const int* __restrict__ token_ids,     // [T]
    const unsigned* __restrict__ words,    // this and the next two as in `multiply`
    const float* __restrict__ scales,
    const float* __restrict__ minimums,
    int inputs, int outputs,
    float* __restrict__ rows)              // [T, inputs]
{
    const int k = blockIdx.y * blockDim.x + threadIdx.x;
    if (k >= inputs) return;
    const int block = k / BLOCK, within = k % BLOCK, o = token_ids[blockIdx.x];
    const float scale = BITS < 16 ? scales[(size_t)block * outputs + o] : 1;
    const float minimum = HAS_MINIMUMS ? minimums[(size_t)block * outputs + o] : 0;
    const unsigned word = words[((size_t)block * WORDS + within / PER_WORD) * outputs + o];
    rows[(size_t)blockIdx.x * inputs + k] = weight(word, within % PER_WORD, scale, minimum);
}
