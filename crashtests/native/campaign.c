#include <stdio.h>
#include <time.h>

#include "images.h"

uint64_t campaign_draw(struct campaign *c, uint64_t n)
{
    uint64_t z = c->rng += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (z ^ z >> 31) % n;
}

void campaign_progress(struct campaign *c, bool last)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    if (!last && ms < c->reported_ms + 300)
        return;
    c->reported_ms = ms;
    printf("{\"progress\": %lu}\n",
           (unsigned long)(c->tally.distinct ? c->tally.distinct : c->tally.images));
    fflush(stdout);
}
