// The paged cache: keys and values into it, and attention over it.
//
// Constants: IS_HALF, whether keys and values are kept as float16; HEAD_DIM, K; TILE, the keys that are seen at once, and
// the threads of a block of `attend`.

#if IS_HALF
typedef unsigned short Stored;  // a float16's bits
#else
typedef float Stored;
#endif

#define COMPONENTS ((HEAD_DIM + TILE - 1) / TILE)  // of a head that one thread takes: lane, lane + TILE, ...
#define NOTHING __uint_as_float(0xFF800000u)  // minus infinity: the score of a key that must not be seen

// A stored number as float32.
__device__ float widen(float number) { return number; }

// A float16 has 5 bits of exponent and 10 of fraction, a float32 has 8 and 23. Moved to where a float32 has them, they
// make a number that is right but for 2^112, by which the two kinds' exponents are apart; infinity and NaN stay such.
__device__ float widen(unsigned short half) {
    const unsigned sign = (half & 0x8000u) << 16, rest = (half & 0x7FFFu) << 13;
    const float size = (half & 0x7C00u) == 0x7C00u ? __uint_as_float(rest | 0x7F800000u)
                                                   : __uint_as_float(rest) * 5.192296858534828e33f;
    return sign ? -size : size;
}

// Store each token's key and value at its slot in a layer of the cache. Block t takes token t.
extern "C" __global__ void write_kv(
    const Stored* __restrict__ keys,       // [T, G, K]
    const Stored* __restrict__ values,     // [T, G, K]
    const long long* __restrict__ slots,   // [T]
    int layer, int layers, int kv_heads, int block_size,
    Stored* __restrict__ key_blocks,       // [N, L, G, K, B]
    Stored* __restrict__ value_blocks)     // [N, L, G, B, K]
{
    const long long block = slots[blockIdx.x] / block_size;
    const int offset = slots[blockIdx.x] % block_size;
    for (int i = threadIdx.x; i < kv_heads * HEAD_DIM; i += blockDim.x) {
        const int g = i / HEAD_DIM, k = i % HEAD_DIM;
        const size_t head = ((size_t)block * layers + layer) * kv_heads + g;
        key_blocks[(head * HEAD_DIM + k) * block_size + offset] = keys[(size_t)blockIdx.x * kv_heads * HEAD_DIM + i];
        value_blocks[(head * block_size + offset) * HEAD_DIM + k] = values[(size_t)blockIdx.x * kv_heads * HEAD_DIM + i];
    }
}

// Which sequence a token belongs to: the last whose tokens start at or before it.
__device__ int sequence_of(int token, const int* query_starts, int sequences) {
    int low = 0, high = sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (query_starts[middle] <= token) low = middle; else high = middle;
    }
    return low;
}

// Causal attention of one token's query head over its own sequence's keys. Block (t, h) takes head h of token t.
//
// Keys come in tiles of TILE positions, which start at multiples of TILE: thread j scores the tile's j-th key, straight
// from its block of the cache; then thread k adds up component k of the values, each times its weight. No one ever sees
// all the scores: what has been added up so far is scaled down whenever a tile brings a larger score (online softmax,
// Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022). The order of every sum is of positions alone.
extern "C" __global__ void attend(
    const float* __restrict__ queries,        // [T, H, K]
    const Stored* __restrict__ key_blocks,    // [N, L, G, K, B]
    const Stored* __restrict__ value_blocks,  // [N, L, G, B, K]
    const int* __restrict__ positions,        // [T]
    const int* __restrict__ query_starts,     // [S + 1]
    const int* __restrict__ block_tables,     // [S, table_width]
    int layer, int layers, int kv_heads, int block_size, int sequences, int table_width,
    float scale, int window, float soft_cap,  // a soft cap of 0: none
    float* __restrict__ attended)             // [T, H, K]
{
    __shared__ float query[HEAD_DIM], scores[TILE], weights[TILE];
    const int token = blockIdx.x, head = blockIdx.y, heads = gridDim.y, lane = threadIdx.x;
    const int g = head / (heads / kv_heads);
    const int* table = block_tables + (size_t)sequence_of(token, query_starts, sequences) * table_width;
    const int end = positions[token] + 1, begin = max(0, end - window);  // the keys it sees
    const size_t own = ((size_t)token * heads + head) * HEAD_DIM;

    for (int k = lane; k < HEAD_DIM; k += TILE) query[k] = queries[own + k];
    __syncthreads();

    float largest = NOTHING, total = 0;
    float sums[COMPONENTS] = {0};
    for (int start = begin / TILE * TILE; start < end; start += TILE) {
        const int position = start + lane;
        const bool is_seen = begin <= position && position < end;
        float score = NOTHING;
        if (is_seen) {
            const size_t block = ((size_t)table[position / block_size] * layers + layer) * kv_heads + g;
            const Stored* key = key_blocks + block * HEAD_DIM * block_size + position % block_size;
            score = 0;
            for (int k = 0; k < HEAD_DIM; k++) score = fmaf(query[k], widen(key[(size_t)k * block_size]), score);
            score *= scale;
            if (soft_cap > 0) score = soft_cap * tanhf(score / soft_cap);
        }
        scores[lane] = score;
        __syncthreads();  // until the tile is scored

        const float before = largest;
        for (int j = 0; j < TILE; j++) largest = fmaxf(largest, scores[j]);
        weights[lane] = is_seen ? expf(score - largest) : 0;
        __syncthreads();  // until it is weighed

        const float shrink = expf(before - largest);  // 0 at the first tile
        total *= shrink;
        for (int j = 0; j < TILE; j++) total += weights[j];
        const int stop = min(start + TILE, end);
#pragma unroll
        for (int i = 0; i < COMPONENTS; i++) {
            const int k = lane + i * TILE;
            if (k >= HEAD_DIM) break;
            float sum = sums[i] * shrink;
            for (int j = max(start, begin); j < stop;) {  // block by block; what is not seen is not touched
                const int offset = j % block_size, run = min(block_size - offset, stop - j);
                const size_t block = ((size_t)table[j / block_size] * layers + layer) * kv_heads + g;
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
