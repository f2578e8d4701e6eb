// Runs a CUDA kernel on the CPU, thread by thread. The tests include this file before a kernel's source.
//
// Each thread of a block is a fiber with its own stack. The fibers run one after another until each ends or reaches
// __syncthreads(); then the next phase begins. The caller chooses the order of the fibers within a phase: a result that
// depends on this order reveals a race condition.
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>

#define __global__
#define __device__ static
#define __shared__ static  // one block runs at a time

static int max(int a, int b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }

struct Dim3 { unsigned x, y, z; };
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

static float __uint_as_float(unsigned bits) { float number; memcpy(&number, &bits, 4); return number; }

struct Fiber {
    ucontext_t context;
    char stack[32768];
    bool waits, ended;
};
static Fiber fibers[1024];  // the maximum number of threads per block
static ucontext_t scheduler;
static Fiber* running;
static void (*body)();

static void __syncthreads() {
    running->waits = true;
    swapcontext(&running->context, &scheduler);
}

static void start() {
    body();
    running->ended = true;
    swapcontext(&running->context, &scheduler);
}

// Run one block to its end. Return false if some threads wait at a barrier after others have ended.
static bool run_block(int count, bool reversed) {
    for (int i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = sizeof fiber.stack;
        fiber.context.uc_link = nullptr;
        fiber.ended = false;
        makecontext(&fiber.context, start, 0);
    }
    for (;;) {
        int waiting = 0, ended = 0;
        for (int i = 0; i < count; i++) {
            const int thread = reversed ? count - 1 - i : i;
            running = &fibers[thread];
            running->waits = false;
            threadIdx = {(unsigned)thread, 0, 0};
            swapcontext(&scheduler, &running->context);
            waiting += running->waits;
            ended += running->ended;
        }
        if (ended == count) return true;
        if (waiting != count) return false;
    }
}

// Append the type of a parameter in NumPy's notation: "f4 const*," for const float*.
template <typename T>
void add_name(char*& end) {
    using Bare = std::remove_const_t<std::remove_pointer_t<T>>;
    const char kind = std::is_floating_point_v<Bare> ? 'f' : std::is_unsigned_v<Bare> ? 'u' : 'i';
    const bool is_const = std::is_const_v<std::remove_pointer_t<T>>;
    end += sprintf(end, "%c%d%s%s,", kind, (int)sizeof(Bare), is_const ? " const" : "", std::is_pointer_v<T> ? "*" : "");
}

static void** arguments;

template <auto kernel, typename... A, size_t... I>
void call(void (*)(A...), std::index_sequence<I...>) { kernel(*(A*)arguments[I]...); }

template <typename... A>
const char* signature_of(void (*)(A...)) {
    static char names[1024];
    char* end = names;
    (add_name<A>(end), ...);
    return names;
}

template <auto kernel, typename... A>
bool launch_all(void (*)(A...), const unsigned* grid, unsigned threads, bool reversed) {
    body = [] { call<kernel>(kernel, std::index_sequence_for<A...>()); };
    gridDim = {grid[0], grid[1], 1};
    blockDim = {threads, 1, 1};
    for (unsigned x = 0; x < grid[0]; x++)
        for (unsigned y = 0; y < grid[1]; y++) {
            blockIdx = {x, y, 0};
            if (!run_block(threads, reversed)) return false;
        }
    return true;
}

#define EXPORT(kernel)                                                                                        \
    extern "C" const char* signature_of_##kernel() { return signature_of(kernel); }                                   \
    extern "C" bool launch_##kernel(const unsigned* grid, unsigned threads, void** given, bool reversed) {            \
        arguments = given;                                                                                            \
        return launch_all<kernel>(kernel, grid, threads, reversed);                                                   \
    }
