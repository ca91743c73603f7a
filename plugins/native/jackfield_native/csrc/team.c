#include "team.h"

#include <stdatomic.h>
#include <stddef.h>

typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*number_function)(void);

/* Set once, before any work. Called through pointers, so that no second runtime is linked in. */
static parallel_function start_parallel;
static number_function own_number;

typedef struct {
    jf_work work;
    void *task;
    long items;
    atomic_long next;
} job;

/* GOMP_parallel and omp_get_thread_num of the process's runtime. */
void jf_set_runtime(void *parallel, void *number) {
    start_parallel = (parallel_function)parallel;
    own_number = (number_function)number;
}

static void take_items(void *argument) {
    job *shared = argument;
    int member = own_number();
    long item;
    while ((item = atomic_fetch_add(&shared->next, 1)) < shared->items) shared->work(shared->task, item, member);
}

void jf_run(jf_work work, void *task, long items, int threads) {
    if (threads > items) threads = (int)items;
    if (threads <= 1 || start_parallel == NULL) {
        for (long item = 0; item < items; item++) work(task, item, 0);
        return;
    }
    job shared = {work, task, items, 0};
    start_parallel(take_items, &shared, (unsigned)threads, 0);
}

typedef struct {
    atomic_ulong seen;
    int wanted;
} meeting;

static void meet(void *task, long item, int member) {
    meeting *all = task;
    (void)item;
    atomic_fetch_or(&all->seen, 1ul << member % 64);
    for (long spin = 0; spin < 200000000; spin++)
        if (__builtin_popcountl(atomic_load_explicit(&all->seen, memory_order_relaxed)) >= all->wanted) return;
}

/* How many threads share work when `threads` (at most 64) are asked for: each waits a while for the others. */
int jf_team_size(int threads) {
    meeting all = {0, threads};
    jf_run(meet, &all, threads, threads);
    return __builtin_popcountl(atomic_load(&all.seen));
}
