// Norms: one thread block per row.
//
// Thread i handles numbers i, i + THREADS, i + 2 * THREADS, ... of the row, so that neighbouring threads read
// neighbouring numbers. Sums over the row are computed in two steps, each in a fixed order: every thread sums its own
// numbers, then every thread sums the results of all.
//
// Constant: THREADS, the threads per thread block.

// Return the sum of the numbers of all threads of the thread block, the same in each thread.
__device__ float sum_of_all(float own) {
    __shared__ float sums[THREADS];
    __syncthreads();  // until no thread reads the previous sums any more
    sums[threadIdx.x] = own;
    __syncthreads();  // until all sums have been written
    float total = 0;
    for (int i = 0; i < THREADS; i++) total += sums[i];
    return total;
}

// Compute x / sqrt(mean of x^2 + eps) * weight for each row of [T, size]. Thread block t handles row t.
extern "C" __global__ void rms_norm(
    const float* __restrict__ x, const float* __restrict__ weight, float eps, int size, float* __restrict__ normed)
{
    const size_t row = (size_t)blockIdx.x * size;
    float squares = 0;
    for (int i = threadIdx.x; i < size; i += THREADS) squares = fmaf(x[row + i], x[row + i], squares);
    const float root = sqrtf(sum_of_all(squares) / size + eps);
    for (int i = threadIdx.x; i < size; i += THREADS) normed[row + i] = x[row + i] / root * weight[i];
}

// Compute the same for x minus its mean, and add a bias.
extern "C" __global__ void layer_norm(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias, float eps, int size,
    float* __restrict__ normed)
{
    const size_t row = (size_t)blockIdx.x * size;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < size; i += THREADS) sum += x[row + i];
    const float mean = sum_of_all(sum) / size;
    for (int i = threadIdx.x; i < size; i += THREADS) squares = fmaf(x[row + i] - mean, x[row + i] - mean, squares);
    const float root = sqrtf(sum_of_all(squares) / size + eps);
    for (int i = threadIdx.x; i < size; i += THREADS) normed[row + i] = (x[row + i] - mean) / root * weight[i] + bias[i];
}
