/* Work shared out among the threads of the OpenMP runtime that the process already has. */
#ifndef JF_TEAM_H
#define JF_TEAM_H

/* Do one item; member is below the number of threads, and no two items of one member overlap in time. */
typedef void (*jf_work)(void *task, long item, int member);

/* Do all items, each once, in no particular order. */
void jf_run(jf_work work, void *task, long items, int threads);

#endif
