#!/bin/busybox sh
# The first process of the virtual machine. What it does comes on the kernel's command line: task=dax|format
/bin/busybox mkdir -p /proc /sys /dev /mnt /run /tmp
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
echo 3 > /proc/sys/kernel/printk
echo # what the firmware said ends here
for module in $(cat /modules/order); do insmod /modules/$module.ko || echo "BROKEN no module $module"; done
for word in $(cat /proc/cmdline); do case $word in task=*) task=${word#task=} ;; commits=*) commits=${word#commits=} ;; esac; done
case $task in
format)
    /tools/ndctl create-namespace -f -e namespace0.0 -m fsdax -M dev > /dev/null && /tools/mke2fs -q -t ext4 -b 4096 -F /dev/pmem0 && echo formatted
    ;;
dax)
    mount -t ext4 -o dax /dev/pmem0 /mnt && /tools/guest run /mnt/store 1 $commits
    umount /mnt && echo unmounted
    ;;
file)
    mount -t ext4 /dev/vda /mnt && /tools/guest run /mnt/store 2 $commits /dev/vda $(cat /modules/marks)
    umount /mnt && echo unmounted
    ;;
esac
poweroff -f
