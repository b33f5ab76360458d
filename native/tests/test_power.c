/* The model of a power failure (power.h), primitive by primitive. */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "crash/power.h"
#include "test.h"

#define BYTES 4096u

static void *sync_of_another(void *store)
{
    pms_persist_hook_fd = *(int *)store;
    pms_power_note(PMS_PRIM_SYNC, 0, 0);
    return NULL;
}

/* One thread is about to write (the hook comes before) while another syncs; then it writes, and
 * syncs itself. What it wrote is durable. */
static void a_write_that_another_threads_sync_overtakes_is_durable(void)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        int fd = memfd_create("power", MFD_CLOEXEC);
        unsigned char page[BYTES], found[BYTES];
        CHECK(ftruncate(fd, BYTES) == 0);
        pid_t pid = fork();
        if (pid == 0) {
            memset(page, 7, sizeof page);
            if (!pms_power_start(fd, seed))
                _exit(1);
            pms_persist_hook_fd = fd;
            pms_power_note(PMS_PRIM_PWRITE, 0, BYTES); /* the commit's hook */
            pthread_t writer;
            if (pthread_create(&writer, NULL, sync_of_another, &fd) != 0 ||
                pthread_join(writer, NULL) != 0)
                _exit(2);
            if (pwrite(fd, page, BYTES, 0) != BYTES)
                _exit(3);
            pms_power_note(PMS_PRIM_SYNC, 0, 0); /* acknowledged */
            pms_power_fail();
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(pread(fd, found, BYTES, 0) == BYTES);
        size_t lost = 0;
        for (size_t i = 0; i < BYTES; i++)
            lost += found[i] != 7;
        CHECK(lost == 0);
        close(fd);
    }
}

int main(void)
{
    TEST(a_write_that_another_threads_sync_overtakes_is_durable);
    return test_summary();
}
