/* The images seen, by a hash of 128 bits: a table that processes share through a file. */
#ifndef CRASH_SEEN_H
#define CRASH_SEEN_H

#include <stdbool.h>
#include <stdint.h>

/* The file's size says how many it holds. Jobs that share one do not count an image twice, but
 * each tries its own images whatever others have tried: what a job does follows from its options
 * alone. NULL: a table of this process. */
void seen_open(const char *path);

/* Inserts; true: it was not there. Other processes do the same. */
bool seen_first(uint64_t a, uint64_t b);

#endif
