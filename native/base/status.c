#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int(pms_fail)(struct pms_error *error, enum pms_status status, const char *what, ...)
{
    if (!error)
        return status;
    va_list args;
    memset(error, 0, sizeof *error);
    error->status = status;
    va_start(args, what);
    vsnprintf(error->what, sizeof error->what, what, args);
    va_end(args);
    return status;
}

int(pms_fail_errno)(struct pms_error *error, const char *what)
{
    int err = errno;
    bool full = err == ENOSPC || err == EDQUOT || err == EFBIG;
    int status = pms_fail(error, full ? PMS_E_FULL : PMS_E_OS, "%s", what);
    if (error)
        error->sys_errno = err;
    return status;
}

static void say(const char *text)
{
    ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    (void)ignored;
}

/* Called from the fault handler too: no stdio. */
_Noreturn void pms_assert_failed(const char *cond, const char *file, int line)
{
    char digits[16];
    int at = (int)sizeof digits;
    digits[--at] = '\0';
    do {
        digits[--at] = (char)('0' + line % 10);
        line /= 10;
    } while (line && at > 0);
    say("pmstore: invariant broken: ");
    say(cond);
    say(" (");
    say(file);
    say(":");
    say(&digits[at]);
    say("). The process ends here; the store recovers to its last commit.\n");
    abort();
}
