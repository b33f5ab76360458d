#include "explorer.h"

void prefix_walk(struct explorer *x, const struct tr_event *e, uint64_t every)
{
    if (e->kind == TR_SIZE) {
        x->bytes = x->now_bytes;
        return;
    }
    if (!is_store(e)) {
        if (e->kind == TR_BEGIN || e->kind == TR_ACK)
            image_ask(x, x->bytes, "prefix at a mark");
        return;
    }
    const unsigned char *from = x->t->data + e->data;
    for (uint64_t done = 0; done < e->bytes && !over(x);) {
        /* on average every */
        uint64_t step = e->word ? 8 : every < 2 ? 1 : 1 + campaign_draw(x->c, 2 * every - 1);
        if (done + step > e->bytes)
            step = e->bytes - done;
        image_put_bytes(x, e->off + done, from + done, step);
        done += step;
        if (x->c->tally.images < x->c->budget)
            image_ask(x, x->bytes, "prefix");
    }
}
