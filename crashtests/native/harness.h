/* What the modes of the program (main.c) share: files, children, the base store and its recorded
 * workload. */
#ifndef CRASH_HARNESS_H
#define CRASH_HARNESS_H

#include <sys/types.h>

#include "images.h"

struct options {
    const char *mode, *workload, *seen, *trace, *base, *states;
    uint64_t step, most; /* every step-th primitive, but at most about so many */
    struct campaign campaign;
};

/* ---- child.c: all of these end the process where they cannot do it ---- */
void *shared_memory(size_t bytes);
unsigned char *file_read(const char *path, uint64_t *bytes);
/* pages of zeros stay holes */
void file_write(const char *path, const unsigned char *from, uint64_t bytes);

/* Forks; true in the child, which leaves by leave(). It dies with us, and leaves no core. */
bool child_here(pid_t *child);
int child_wait(pid_t child); /* its status */

/* ---- scene.c ---- */
extern struct board *board; /* of this process and its children */

struct scene {
    char path[256];
    const struct workload *workload; /* NULL: of a trace that another program has made of itself */
    unsigned char *base;             /* the store before it */
    uint64_t bytes;
    struct trace *trace;
};
void scene_set(struct options *o, struct scene *s);
/* runs the workload under the recorder; false: that failed, and was reported */
bool scene_record(struct campaign *c, struct scene *s);
/* the states of another program's trace; false likewise */
bool scene_know(struct options *o, struct scene *s);
void scene_end(struct scene *s);
void plain_failure(struct campaign *c, const char *how, uint64_t n, const char *message);
/* reports a failure, and keeps the file as it was found */
void judge(struct campaign *c, const struct question *q, const char *how, uint64_t n);

/* ---- modes: a line of JSON each ---- */
void kills_run(struct options *o);   /* kills.c */
void failing_run(struct options *o); /* failing.c */

#endif
