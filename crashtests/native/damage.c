#include "explorer.h"

static uint64_t damaged_place(struct explorer *x)
{
    struct campaign *c = x->c;
    uint64_t head = PMS_OFF_SEGMENTS + 8 * PMS_PAGE;
    switch (campaign_draw(c, 8)) {
    case 0: return campaign_draw(c, 8 * PMS_PAGE);                         /* fixed pages */
    case 1: return campaign_draw(c, 8) * PMS_PAGE + campaign_draw(c, 128); /* their beginnings */
    case 2: return campaign_draw(c, x->bytes);
    case 3: return PMS_OFF_FASTLOG(campaign_draw(c, 2)) + campaign_draw(c, 2048);
    case 4: return PMS_OFF_SEGMENTS + campaign_draw(c, PMS_PAGE); /* page table */
    default: break;
    }
    for (int i = 0; i < 200; i++) { /* a byte that is not zero: it means something */
        uint64_t at = campaign_draw(c, campaign_draw(c, 2) ? x->bytes : head);
        if (x->img[at])
            return at;
    }
    return campaign_draw(c, x->bytes);
}

void damage_here(struct explorer *x, uint64_t count)
{
    struct campaign *c = x->c;
    for (uint64_t i = 0; i < count && !over(x); i++) {
        uint64_t bytes = x->bytes, at = damaged_place(x), word = at & ~7ull, sector = at & ~511ull;
        const char *how = "flipped bit";
        switch (campaign_draw(c, 10)) {
        case 0:
            bytes = campaign_draw(c, x->bytes / SECTOR + 1) * SECTOR;
            how = "truncated";
            break;
        case 1:
            for (uint64_t k = 0; k < SECTOR; k += 8)
                image_try_word(x, sector + k, image_mix(sector + k, c->rng, 5));
            how = "garbage";
            break;
        case 2: {
            uint64_t other = damaged_place(x) & ~511ull;
            for (uint64_t k = 0; k < SECTOR; k += 8)
                image_try_word(x, sector + k, *word_at(x->img, other + k));
            how = "a sector of another place";
            break;
        }
        case 3:
            image_try_word(x, word,
                           campaign_draw(c, 2) ? x->bytes + campaign_draw(c, PMS_PAGE)
                                               : ~0ull << campaign_draw(c, 64));
            how = "a large number";
            break;
        case 4:
            for (int k = 0; k < 4; k++) {
                uint64_t w = damaged_place(x) & ~7ull;
                image_try_word(x, w, *word_at(x->img, w) ^ 1ull << campaign_draw(c, 64));
            }
            how = "several flipped bits";
            break;
        default:
            image_try_word(x, word,
                           *word_at(x->img, word) ^ 1ull << (at % 8 * 8 + campaign_draw(c, 8)));
        }
        image_ask(x, bytes, how);
        image_take_back(x);
    }
}
