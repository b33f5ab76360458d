#ifndef PMS_COMMIT_FORK_H
#define PMS_COMMIT_FORK_H

void pms_fork_prepare_once(void); /* installs the fork handlers of the process */

#endif
