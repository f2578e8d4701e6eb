// Runs a CUDA kernel on the CPU, thread by thread: what the tests put before a kernel's own source.
//
// Each thread of a block is a fiber with a stack of its own. One after another they run until they end or reach
// __syncthreads(); when all have, the next phase begins. In which order they run within a phase is the caller's choice:
// a result that depends on it comes from a race.
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

struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;

static float __uint_as_float(unsigned bits) { float number; memcpy(&number, &bits, 4); return number; }

struct Fiber {
    ucontext_t context;
    char stack[32768];
    bool waits, ended;
};
static Fiber fibers[1024];  // as many threads as a block can have
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

// One block, from its first thread's first line to its last's last. False if some threads wait for others that are gone.
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

// What a parameter is, in NumPy's words: "f4 const*," for const float*.
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
