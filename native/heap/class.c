#include "heap/heap.h"

/* Part of the format: slot size and slab pages of each class. Multiples of 64 up to 1 KiB, from
 * there thirteen geometric steps (5.5 %) to each power of two, rounded up to 64. A slab has the
 * fewest pages, 16 at least, that hold 8 slots and leave at most 4 % of it unused.
 * tests/test_heap.c derives the table anew. */
static const struct {
    uint16_t bytes, pages;
} class_table[] = {
    {64, 16},    {128, 16},   {192, 16},   {256, 16},   {320, 16},   {384, 16},   {448, 16},
    {512, 16},   {576, 16},   {640, 16},   {704, 16},   {768, 16},   {832, 16},   {896, 16},
    {960, 16},   {1024, 16},  {1088, 16},  {1152, 16},  {1216, 16},  {1280, 16},  {1344, 16},
    {1472, 16},  {1536, 16},  {1600, 16},  {1664, 16},  {1792, 16},  {1856, 16},  {1984, 16},
    {2048, 16},  {2176, 16},  {2304, 16},  {2432, 16},  {2560, 16},  {2688, 16},  {2880, 16},
    {3008, 16},  {3200, 16},  {3328, 16},  {3520, 16},  {3712, 16},  {3904, 21},  {4096, 16},
    {4352, 16},  {4608, 16},  {4864, 16},  {5120, 18},  {5376, 16},  {5696, 17},  {5952, 16},
    {6336, 16},  {6656, 18},  {7040, 16},  {7424, 20},  {7808, 21},  {8192, 16},  {8704, 17},
    {9152, 18},  {9664, 19},  {10176, 20}, {10752, 21}, {11328, 23}, {11904, 24}, {12608, 25},
    {13248, 26}, {14016, 28}, {14784, 29}, {15552, 31}, {16384, 32}, {17344, 34}, {18240, 36},
    {19264, 38}, {20288, 40}, {21440, 42}, {22592, 45}, {23808, 47}, {25152, 50}, {26496, 52},
    {27968, 55}, {29504, 58}, {31104, 61}, {32768, 64},
};
#define CLASS_COUNT (sizeof class_table / sizeof *class_table)
#define LINEAR_MAX 1024u

unsigned pms_class_count(void) { return (unsigned)CLASS_COUNT; }

unsigned pms_class_of(uint64_t bytes)
{
    PMS_ASSERT(bytes > 0 && bytes <= PMS_SMALL_MAX);
    if (bytes <= LINEAR_MAX)
        return (unsigned)((bytes - 1) / PMS_LINE);
    /* the answer lies in [low, high] */
    unsigned low = LINEAR_MAX / PMS_LINE, high = (unsigned)CLASS_COUNT - 1;
    while (low < high) {
        unsigned mid = (low + high) / 2;
        if (class_table[mid].bytes >= bytes)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

uint32_t pms_class_bytes(unsigned cls)
{
    PMS_ASSERT(cls < CLASS_COUNT);
    return class_table[cls].bytes;
}

uint32_t pms_class_pages(unsigned cls)
{
    PMS_ASSERT(cls < CLASS_COUNT);
    return class_table[cls].pages;
}

uint32_t pms_class_slots(unsigned cls)
{
    PMS_ASSERT(cls < CLASS_COUNT);
    return class_table[cls].pages * PMS_PAGE / class_table[cls].bytes;
}
