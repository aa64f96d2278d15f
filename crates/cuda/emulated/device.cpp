// See device.h.
#include "device.h"

#include <ucontext.h>

Index threadIdx, blockIdx, gridDim, blockDim;

namespace device {
namespace {

constexpr size_t STACK_BYTES = 48 << 10;
// Rounds in which nothing moves before that is called a deadlock: warps and what is under way are left out at random.
constexpr unsigned PATIENCE = 300;

enum class Waits { No, Warp, Block, Condition };

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    Waits waits;
    std::function<bool()> ready;
    Pick pick;
    uint32_t value, argument;
};

std::vector<Fiber> fibers;
std::vector<std::vector<uint8_t>> memories;
std::vector<std::function<void()>> under_way;
std::function<void()> body;
std::mt19937 chance;
ucontext_t scheduler;
unsigned current, threads, blocks;

void enter() {
    body();
    fibers[current].done = true;
    swapcontext(&fibers[current].context, &scheduler);
}

void give_way(Waits waits) {
    Fiber& own = fibers[current];
    own.waits = waits;
    swapcontext(&own.context, &scheduler);
}

// Runs a warp's lanes until none can; whether one could.
bool run_warp(unsigned warp, Index first_block) {
    bool moved = false;
    for (bool again = true; again;) {
        again = false;
        bool all_exchange = true;
        unsigned left = 0;
        for (unsigned i = warp * 32; i < warp * 32 + 32; i++) {
            Fiber& f = fibers[i];
            if (!f.done && f.waits == Waits::Condition && f.ready()) {
                f.waits = Waits::No;
            }
            if (!f.done && f.waits == Waits::No) {
                current = i;
                threadIdx = {i % threads, 0, 0};
                blockIdx = {first_block.x + i / threads, first_block.y, 0};
                swapcontext(&scheduler, &f.context);
                again = moved = true;
            }
            left += !f.done;
            all_exchange = all_exchange && !f.done && f.waits == Waits::Warp;
        }
        if (left > 0 && all_exchange) {
            uint32_t values[32];
            for (unsigned l = 0; l < 32; l++) {
                values[l] = fibers[warp * 32 + l].value;
                if (fibers[warp * 32 + l].pick != fibers[warp * 32].pick) {
                    fail("lanes of a warp do different things");
                }
            }
            for (unsigned l = 0; l < 32; l++) {
                Fiber& f = fibers[warp * 32 + l];
                f.value = f.pick == Pick::Lane ? values[f.argument % 32] : f.pick == Pick::Xor ? values[l ^ f.argument] : f.value;
                f.waits = Waits::No;
            }
            again = moved = true;
        }
    }
    return moved;
}

// Opens the barriers of blocks whose threads have all come; whether there was one. `ended` says that no thread is left.
bool open_barriers(bool& ended) {
    bool opened = false;
    ended = true;
    for (unsigned b = 0; b < blocks; b++) {
        unsigned waiting = 0, gone = 0;
        for (unsigned t = b * threads; t < (b + 1) * threads; t++) {
            waiting += !fibers[t].done && fibers[t].waits == Waits::Block;
            gone += fibers[t].done;
        }
        ended = ended && gone == threads;
        if (waiting > 0 && waiting + gone == threads) {
            if (gone > 0) {
                fail("threads ended before a barrier of their block");
            }
            for (unsigned t = b * threads; t < (b + 1) * threads; t++) {
                fibers[t].waits = Waits::No;
            }
            opened = true;
        }
    }
    return opened;
}

bool finish_some() {
    bool moved = false;
    for (size_t i = under_way.size(); i-- > 0;) {
        if (chance() % 3 == 0) {
            const auto work = under_way[i];
            under_way[i] = under_way.back();
            under_way.pop_back();
            work();
            moved = true;
        }
    }
    return moved;
}

void run_cluster(Index first_block, unsigned shared_bytes) {
    memories.assign(blocks, std::vector<uint8_t>(shared_bytes + 1024, 0xff));
    under_way.clear();
    for (unsigned i = 0; i < blocks * threads; i++) {
        Fiber& f = fibers[i];
        f.done = false;
        f.waits = Waits::No;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, enter, 0);
    }
    std::vector<unsigned> order(blocks * threads / 32);
    for (unsigned i = 0; i < order.size(); i++) {
        order[i] = i;
    }
    unsigned idle = 0;
    for (bool ended = false; !ended;) {
        std::shuffle(order.begin(), order.end(), chance);
        bool moved = finish_some();
        for (unsigned warp : order) {
            moved |= chance() % 4 != 0 && run_warp(warp, first_block);
        }
        moved |= open_barriers(ended);
        idle = moved ? 0 : idle + 1;
        if (!ended && idle > PATIENCE) {
            fail("a deadlock");
        }
    }
    while (!under_way.empty()) {
        finish_some();
    }
}

}  // namespace

void fail(const char* what) {
    printf("thread %u of block %u: %s\n", threadIdx.x, blockIdx.x, what);
    exit(1);
}

void launch(const Launch& l, const std::function<void()>& kernel) {
    body = kernel;
    gridDim = l.grid;
    blockDim = {l.threads, 1, 1};
    threads = l.threads;
    blocks = l.cluster;
    chance.seed(l.seed);
    if (fibers.size() < threads * blocks) {
        fibers.resize(threads * blocks);
    }
    for (Fiber& f : fibers) {
        f.stack.resize(STACK_BYTES);
    }
    for (unsigned y = 0; y < l.grid.y; y++) {
        for (unsigned x = 0; x < l.grid.x; x += blocks) {
            run_cluster({x, y, 0}, l.shared_bytes);
        }
    }
}

unsigned thread() { return current; }
unsigned rank() { return current / threads; }
unsigned cluster_blocks() { return blocks; }

uint8_t* shared(unsigned of_rank) {
    // Aligned as a block's memory is.
    const uintptr_t at = reinterpret_cast<uintptr_t>(memories[of_rank].data());
    return memories[of_rank].data() + (1024 - at % 1024) % 1024;
}

void wait_until(std::function<bool()> ready) {
    if (!ready()) {
        fibers[current].ready = std::move(ready);
        give_way(Waits::Condition);
    }
}

void later(std::function<void()> work) { under_way.push_back(std::move(work)); }

bool lives(unsigned of_rank) {
    const auto first = fibers.begin() + of_rank * threads;
    return std::any_of(first, first + threads, [](const Fiber& f) { return !f.done; });
}

uint32_t exchange(Pick pick, uint32_t value, uint32_t argument) {
    Fiber& own = fibers[current];
    own.pick = pick;
    own.value = value;
    own.argument = argument;
    give_way(Waits::Warp);
    return own.value;
}

void sync_block() { give_way(Waits::Block); }

}  // namespace device
