#include "live/wire.h"

#include <linux/filter.h>
#include <stdio.h>
#include <string.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

socklen_t pms_wire_address(struct sockaddr_un *a, uint64_t device, uint64_t inode,
                           int64_t opened_ns)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "pmstore/%llx/%llx/%llx",
                     (unsigned long long)device, (unsigned long long)inode,
                     (unsigned long long)opened_ns);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* A word as the filter loads it. */
static uint32_t word(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

#define WORDS (PMS_WIRE_KEY / 4)

/* The program of the filter: a datagram that is too short to be looked at is dropped, too. */
bool pms_wire_guard(int fd, const uint8_t key[PMS_WIRE_KEY])
{
    struct sock_filter step[2 * WORDS + 2];
    struct sock_fprog program = {.len = sizeof step / sizeof *step, .filter = step};
    int off = 0;
    for (uint32_t i = 0; i < WORDS; i++) {
        uint8_t to_drop = (uint8_t)(2 * (WORDS - 1 - i) + 1);
        step[2 * i] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 4 * i);
        step[2 * i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, word(key + 4 * i),
                                                       0, to_drop);
    }
    step[2 * WORDS] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, ~0u);
    step[2 * WORDS + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0);
    (void)setsockopt(fd, SOL_SOCKET, SO_PASSRIGHTS, &off, sizeof off);
    return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
}
