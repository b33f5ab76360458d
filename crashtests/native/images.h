/* From a trace to the images that a crash may leave, and each of them to the oracle.
 *
 * (i)   LINES of the program: every byte-exact prefix of the stores. (ii)  per 64-byte line any
 * prefix of its stores since it was last durable, dirty lines that nobody flushed included; of
 *       non-temporal stores any subset of 8-byte words until their fence.
 * (iii) per 512-byte sector any version since the last sync, or garbage; the file's size old or
 * new. (iv)  damage: flipped bits, truncation, sectors of garbage or of another place.
 *
 * Between two events that make something durable, or that change what is promised (begin and
 * acknowledgement of a commit), lies a window; its last moment has all images of its earlier
 * ones. All combinations are made if they are at most EXHAUSTIVE; else none, all, each unit
 * alone, all but each, every prefix of each unit alone, units in order, pairs, and seeded
 * samples. */
#ifndef CRASH_IMAGES_H
#define CRASH_IMAGES_H

#include "oracle.h"
#include "trace.h"
#include "workload.h"

#define EXHAUSTIVE 4096u

enum model { MODEL_PREFIX = 1, MODEL_LINES = 2, MODEL_SECTORS = 3, MODEL_DAMAGE = 4 };

struct tally {
    uint64_t images;   /* given to the oracle */
    uint64_t distinct; /* of these, not seen before in this run of the model */
    uint64_t skipped;  /* seen before under the same promise */
    uint64_t failures;
    uint64_t windows, exhaustive; /* and those of which every combination was made */
    uint64_t nested;              /* recoveries traced and crashed again */
    uint64_t nested_images;
};

struct campaign {
    enum model model;
    const char *workload;
    int domain;
    char scratch[200]; /* folder and prefix of scratch files */
    const char *keep;  /* folder for failing images, or NULL */
    uint64_t seed, budget;
    uint64_t stop_after;   /* failures */
    uint32_t nested_every; /* one image in so many gets its recovery crashed; 0: none */
    int depth;             /* of crashes in recovery */
    struct oracle *oracle;
    struct tally tally;
    uint64_t rng, salt;
    uint64_t reported_ms;
};

struct promise {
    uint32_t digest[2];
    uint32_t count;
};

/* Crashes what the trace did to a file that held base at its start. used: pages of it that may
 * be other than zeros; NULL: any. board: digests by commit number; NULL: whatever happens, the
 * state stays fixed->digest (a recovery). */
void images_explore(struct campaign *c, const struct trace *t, const unsigned char *base,
                    const bool *used, const struct board *board, const struct promise *fixed,
                    int depth);

/* ---- campaign.c ---- */
uint64_t campaign_draw(struct campaign *c, uint64_t n);
void campaign_progress(struct campaign *c, bool last);

#endif
