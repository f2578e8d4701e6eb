// Writing to the paged cache, and attention over it.
//
// Constants: IS_FLOAT16, whether keys and values are stored as float16; HEAD_DIM, K; TILE, the keys processed at once
// and the threads per thread block of `attend`.

#if IS_FLOAT16
typedef unsigned short Stored;  // a float16's bits
#else
typedef float Stored;
#endif

#define COMPONENTS ((HEAD_DIM + TILE - 1) / TILE)  // of a head, per thread: lane, lane + TILE, ...
#define MASKED __uint_as_float(0xFF800000u)  // minus infinity: the score of a key that the query may not read

// Return a stored number as float32.
__device__ float widen(float number) { return number; }

// A float16 has 5 bits of exponent and 10 of fraction; a float32 has 8 and 23. Shifted to their places in a float32,
// they give the correct number divided by 2^112, because the exponents of the two types differ by 112. Infinity and NaN
// keep their exponent.
__device__ float widen(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, rest = (bits & 0x7FFFu) << 13;
    const float size = (bits & 0x7C00u) == 0x7C00u ? __uint_as_float(rest | 0x7F800000u)
                                                   : __uint_as_float(rest) * 5.192296858534828e33f;
    return sign ? -size : size;
}

// Write each token's key and value to its slot in the cache. Thread block t handles token t.
extern "C" __global__ void write_kv(
    const Stored* __restrict__ keys,       // [T, G, K]
    const Stored* __restrict__ values,     // [T, G, K]
    const long long* __restrict__ slots,   // [T]
    int layer_in_block, int layers, int kv_heads, int block_size,
    Stored* __restrict__ key_blocks,       // [N, L, G, K, B]
    Stored* __restrict__ value_blocks)     // [N, L, G, B, K]
{
    const long long block = slots[blockIdx.x] / block_size;
    const int offset = slots[blockIdx.x] % block_size;
    for (int i = threadIdx.x; i < kv_heads * HEAD_DIM; i += blockDim.x) {
        const int g = i / HEAD_DIM, k = i % HEAD_DIM;
        const size_t head = ((size_t)block * layers + layer_in_block) * kv_heads + g;
        key_blocks[(head * HEAD_DIM + k) * block_size + offset] = keys[(size_t)blockIdx.x * kv_heads * HEAD_DIM + i];
        value_blocks[(head * block_size + offset) * HEAD_DIM + k] = values[(size_t)blockIdx.x * kv_heads * HEAD_DIM + i];
    }
}

// Return the sequence of a token: the last one whose tokens start at or before it.
__device__ int sequence_of(int token, const int* query_starts, int sequences) {
    int low = 0, high = sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (query_starts[middle] <= token) low = middle; else high = middle;
    }
    return low;
}

// Causal attention of one query head over the keys of its token's sequence. Thread block (t, h) handles head h of token
// t.
//
// Keys are processed in tiles of TILE positions, which start at multiples of TILE. Thread j scores the tile's j-th key,
// directly from the cache; then thread k sums component k of the values, each times its weight. The scores are never
// all stored: the sums so far are scaled down whenever a tile has a larger score (online softmax, Milakov & Gimelshein
// 2018; FlashAttention, Dao et al. 2022). The order of every sum depends on positions only.
extern "C" __global__ void attend(
    const float* __restrict__ queries,        // [T, H, K]
    const Stored* __restrict__ key_blocks,    // [N, L, G, K, B]
    const Stored* __restrict__ value_blocks,  // [N, L, G, B, K]
    const int* __restrict__ positions,        // [T]
    const int* __restrict__ query_starts,     // [S + 1]
    const int* __restrict__ block_tables,     // [S, table_width]
    int layer_in_block, int layers, int kv_heads, int block_size, int sequences, int table_width,
    float scale, int window, float soft_cap,  // 0 for no soft cap
    float* __restrict__ attended)             // [T, H, K]
{
    __shared__ float query[HEAD_DIM], scores[TILE], weights[TILE];
    const int token = blockIdx.x, head = blockIdx.y, heads = gridDim.y, lane = threadIdx.x;
    const int g = head / (heads / kv_heads);
    const int* table = block_tables + (size_t)sequence_of(token, query_starts, sequences) * table_width;
    const int end = positions[token] + 1, begin = max(0, end - window);  // the keys that the query reads
    const size_t own = ((size_t)token * heads + head) * HEAD_DIM;

    for (int k = lane; k < HEAD_DIM; k += TILE) query[k] = queries[own + k];
    __syncthreads();

    float largest = MASKED, total = 0;
    float sums[COMPONENTS] = {0};
    for (int start = begin / TILE * TILE; start < end; start += TILE) {
        const int position = start + lane;
        const bool is_read = begin <= position && position < end;
        float score = MASKED;
        if (is_read) {
            const size_t block = ((size_t)table[position / block_size] * layers + layer_in_block) * kv_heads + g;
            const Stored* key = key_blocks + block * HEAD_DIM * block_size + position % block_size;
            score = 0;
            for (int k = 0; k < HEAD_DIM; k++) score = fmaf(query[k], widen(key[(size_t)k * block_size]), score);
            score *= scale;
            if (soft_cap > 0) score = soft_cap * tanhf(score / soft_cap);
        }
        scores[lane] = score;
        __syncthreads();  // until the tile has been scored

        const float before = largest;
        for (int j = 0; j < TILE; j++) largest = fmaxf(largest, scores[j]);
        weights[lane] = is_read ? expf(score - largest) : 0;
        __syncthreads();  // until all weights have been written

        const float rescale = expf(before - largest);  // 0 for the first tile
        total *= rescale;
        for (int j = 0; j < TILE; j++) total += weights[j];
        const int stop = min(start + TILE, end);
#pragma unroll
        for (int i = 0; i < COMPONENTS; i++) {
            const int k = lane + i * TILE;
            if (k >= HEAD_DIM) break;
            float sum = sums[i] * rescale;
            for (int j = max(start, begin); j < stop;) {  // block by block; values outside the window are not read
                const int offset = j % block_size, run = min(block_size - offset, stop - j);
                const size_t block = ((size_t)table[j / block_size] * layers + layer_in_block) * kv_heads + g;
                const Stored* value = value_blocks + (block * block_size + offset) * HEAD_DIM + k;
                for (int n = 0; n < run; n++) sum = fmaf(weights[j - start + n], widen(value[(size_t)n * HEAD_DIM]), sum);
                j += run;
            }
            sums[i] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < COMPONENTS; i++)
        if (lane + i * TILE < HEAD_DIM) attended[own + lane + i * TILE] = sums[i] / total;
}
