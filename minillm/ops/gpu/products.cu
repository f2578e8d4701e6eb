// Matrix products and embedding, of packed weights (packing.py says how they lie).
//
// One thread, one output, and that for ROWS rows of x at once, so that a weight that has come from memory and been
// unpacked serves them all. Every number is one chain of fused multiply-adds over the inputs in order, of weights as
// float32 has them: the same chain for one row and for many, and the same for integer codes as for the float32 matrix
// that they stand for.
//
// Constants: BITS, ZERO, BLOCK (inputs that share a scale), HAS_MINIMUMS; ROWS for `multiply`.

#define TOGETHER (32 / BITS)                        // weights in a word
#define WORDS ((BLOCK + TOGETHER - 1) / TOGETHER)  // words in a block

// The weight that lies at `place` in a word.
__device__ float weight(unsigned word, int place, float scale, float minimum) {
#if BITS == 32
    return __uint_as_float(word);
#elif BITS == 16
    return __uint_as_float(place == 0 ? word << 16 : word & 0xFFFF0000u);
#else
    int code = (int)(word >> (BITS * place) & ((1u << BITS) - 1)) - ZERO;
    return HAS_MINIMUMS ? code * scale + minimum : code * scale;
#endif
}

// product[row, o] = sum over k of x[row, k] * weight[o, k]. Block (i, j) takes outputs from i * blockDim.x on, of rows
// from j * ROWS on. All threads read the same numbers of x at a time, which costs as little as if one of them did.
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
        row[r] = x + (size_t)min(first + r, rows - 1) * blocks * BLOCK;  // past the last row: it again, for nothing
        sums[r] = 0;
    }
    for (int block = 0; block < blocks; block++) {
        const float scale = BITS < 16 ? scales[(size_t)block * outputs + o] : 1;
        const float minimum = HAS_MINIMUMS ? minimums[(size_t)block * outputs + o] : 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const unsigned word = words[((size_t)block * WORDS + w) * outputs + o];
#pragma unroll
            for (int place = 0; place < TOGETHER && w * TOGETHER + place < BLOCK; place++) {
                const int k = block * BLOCK + w * TOGETHER + place;
                const float own = weight(word, place, scale, minimum);
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r] = fmaf(row[r][k], own, sums[r]);
            }
        }
    }
    for (int r = 0; r < ROWS && first + r < rows; r++) product[(size_t)(first + r) * outputs + o] = sums[r];
}

// rows[t, k] = weight[token_ids[t], k]: the weights of one output, a thread each. Block (t, i) takes token t's from
// i * blockDim.x on.
extern "C" __global__ void embed(
    const int* __restrict__ token_ids,     // [T]
    const unsigned* __restrict__ words,    // as for `multiply`, as are the next two
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
    const unsigned word = words[((size_t)block * WORDS + within / TOGETHER) * outputs + o];
    rows[(size_t)blockIdx.x * inputs + k] = weight(word, within % TOGETHER, scale, minimum);
}
