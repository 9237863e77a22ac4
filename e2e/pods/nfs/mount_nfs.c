/* A mount.nfs for machines whose kernel has no NFS client: an NFSv3 client in user space, as a FUSE file system.
 *
 * mount calls it as: mount.nfs SERVER:/PATH DIRECTORY [-o OPTION,...]. Known options: port and mountport, numbers; other
 * ones are ignored. libnfs speaks NFS, one call at a time, and libfuse serves the kernel. As with the client of Linux:
 *   - a call waits until the server answers, for any time (a "hard" mount), also while the server is restarted;
 *   - fsync sends COMMIT, and so does close after a write;
 *   - attributes and names are cached for three seconds (acregmin), contents of a file until it is opened again;
 *   - calls have user and group of the calling process (AUTH_SYS); an open file that is removed is renamed first.
 * Unlike it: locks hold within one mount only (as with the option local_lock=all).
 *
 * Build: cc -o mount.nfs mount_nfs.c $(pkg-config --cflags --libs fuse3 libnfs)
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <nfsc/libnfs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#define CACHE_SECONDS 3.0
#define MOUNT_FAILED 32 /* exit code of mount(8) */

static struct nfs_context *nfs;

static struct nfsfh *file_of(const struct fuse_file_info *info) { return (struct nfsfh *)(uintptr_t)info->fh; }

/* Let the next calls have user and group of the calling process. */
static void identify(void) {
    static uid_t uid;
    static gid_t gid;
    const struct fuse_context *caller = fuse_get_context();
    if (caller->uid != uid) nfs_set_uid(nfs, uid = caller->uid);
    if (caller->gid != gid) nfs_set_gid(nfs, gid = caller->gid);
}

static int nfs3_getattr(const char *path, struct stat *to, struct fuse_file_info *info) {
    struct nfs_stat_64 from;
    identify();
    int code = info ? nfs_fstat64(nfs, file_of(info), &from) : nfs_lstat64(nfs, path, &from);
    if (code < 0) return code;
    *to = (struct stat){
        .st_dev = from.nfs_dev,
        .st_ino = from.nfs_ino,
        .st_mode = from.nfs_mode,
        .st_nlink = from.nfs_nlink,
        .st_uid = from.nfs_uid,
        .st_gid = from.nfs_gid,
        .st_rdev = from.nfs_rdev,
        .st_size = from.nfs_size,
        .st_blksize = from.nfs_blksize,
        .st_blocks = from.nfs_blocks,
        .st_atim = {from.nfs_atime, from.nfs_atime_nsec},
        .st_mtim = {from.nfs_mtime, from.nfs_mtime_nsec},
        .st_ctim = {from.nfs_ctime, from.nfs_ctime_nsec},
    };
    return 0;
}

static int nfs3_readlink(const char *path, char *to, size_t size) {
    identify();
    return nfs_readlink(nfs, path, to, (int)size);
}

static int nfs3_mkdir(const char *path, mode_t mode) {
    identify();
    return nfs_mkdir2(nfs, path, (int)mode);
}

static int nfs3_unlink(const char *path) {
    identify();
    return nfs_unlink(nfs, path);
}

static int nfs3_rmdir(const char *path) {
    identify();
    return nfs_rmdir(nfs, path);
}

static int nfs3_symlink(const char *target, const char *path) {
    identify();
    return nfs_symlink(nfs, target, path);
}

static int nfs3_rename(const char *from, const char *to, unsigned int flags) {
    identify();
    return flags ? -EINVAL : nfs_rename(nfs, from, to); /* NFS has no RENAME_NOREPLACE or RENAME_EXCHANGE */
}

static int nfs3_link(const char *from, const char *to) {
    identify();
    return nfs_link(nfs, from, to);
}

static int nfs3_chmod(const char *path, mode_t mode, struct fuse_file_info *info) {
    (void)info;
    identify();
    return nfs_chmod(nfs, path, (int)mode);
}

static int nfs3_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *info) {
    (void)info;
    identify();
    return nfs_lchown(nfs, path, (int)uid, (int)gid);
}

static int nfs3_truncate(const char *path, off_t size, struct fuse_file_info *info) {
    identify();
    return info ? nfs_ftruncate(nfs, file_of(info), (uint64_t)size) : nfs_truncate(nfs, path, (uint64_t)size);
}

static int nfs3_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *info) {
    (void)info;
    struct timeval to[2];
    for (int i = 0; i < 2; i++) {
        struct timespec now = times[i];
        if (now.tv_nsec == UTIME_NOW) clock_gettime(CLOCK_REALTIME, &now);
        to[i] = (struct timeval){now.tv_sec, now.tv_nsec == UTIME_OMIT ? 0 : now.tv_nsec / 1000};
    }
    identify();
    return nfs_lutimes(nfs, path, to);
}

static int nfs3_open(const char *path, struct fuse_file_info *info) {
    struct nfsfh *file;
    identify();
    int code = nfs_open(nfs, path, info->flags & (O_ACCMODE | O_TRUNC), &file); /* offsets come from the kernel */
    info->fh = (uintptr_t)file;
    return code;
}

static int nfs3_create(const char *path, mode_t mode, struct fuse_file_info *info) {
    struct nfsfh *file;
    identify();
    int flags = O_CREAT | (info->flags & (O_ACCMODE | O_TRUNC | O_EXCL));
    int code = nfs_open2(nfs, path, flags, (int)(mode & 07777), &file);
    info->fh = (uintptr_t)file;
    return code;
}

static int nfs3_read(const char *path, char *to, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)path;
    identify();
    return nfs_pread(nfs, file_of(info), (uint64_t)offset, size, to);
}

static int nfs3_write(const char *path, const char *from, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)path;
    identify();
    return nfs_pwrite(nfs, file_of(info), (uint64_t)offset, size, from);
}

static int nfs3_fsync(const char *path, int only_data, struct fuse_file_info *info) {
    (void)path, (void)only_data;
    identify();
    return nfs_fsync(nfs, file_of(info));
}

static int nfs3_flush(const char *path, struct fuse_file_info *info) {
    return (info->flags & O_ACCMODE) == O_RDONLY ? 0 : nfs3_fsync(path, 0, info);
}

static int nfs3_release(const char *path, struct fuse_file_info *info) {
    (void)path;
    return nfs_close(nfs, file_of(info));
}

/* A directory is durable when the server has answered. */
static int nfs3_fsyncdir(const char *path, int only_data, struct fuse_file_info *info) {
    (void)path, (void)only_data, (void)info;
    return 0;
}

static int nfs3_readdir(const char *path, void *to, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *info,
                        enum fuse_readdir_flags flags) {
    (void)offset, (void)info, (void)flags;
    struct nfsdir *directory;
    identify();
    int code = nfs_opendir(nfs, path, &directory);
    if (code < 0) return code;
    for (const struct nfsdirent *entry; (entry = nfs_readdir(nfs, directory)) != NULL;)
        fill(to, entry->name, &(struct stat){.st_ino = entry->inode, .st_mode = entry->mode}, 0, 0);
    nfs_closedir(nfs, directory);
    return 0;
}

static int nfs3_statfs(const char *path, struct statvfs *to) {
    identify();
    return nfs_statvfs(nfs, path, to);
}

static void *nfs3_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    (void)connection;
    config->use_ino = 1;
    config->attr_timeout = config->entry_timeout = CACHE_SECONDS;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = nfs3_init,         .getattr = nfs3_getattr,   .readlink = nfs3_readlink, .mkdir = nfs3_mkdir,
    .unlink = nfs3_unlink,     .rmdir = nfs3_rmdir,       .symlink = nfs3_symlink,   .rename = nfs3_rename,
    .link = nfs3_link,         .chmod = nfs3_chmod,       .chown = nfs3_chown,       .truncate = nfs3_truncate,
    .utimens = nfs3_utimens,   .open = nfs3_open,         .create = nfs3_create,     .read = nfs3_read,
    .write = nfs3_write,       .fsync = nfs3_fsync,       .flush = nfs3_flush,       .release = nfs3_release,
    .readdir = nfs3_readdir,   .fsyncdir = nfs3_fsyncdir, .statfs = nfs3_statfs,
};

/* Return the value of an option, or "0". */
static const char *option(char *options, const char *name) {
    static char value[16];
    strcpy(value, "0");
    for (char *rest = strdup(options), *each; (each = strsep(&rest, ",")) != NULL;)
        if (!strncmp(each, name, strlen(name)) && each[strlen(name)] == '=')
            snprintf(value, sizeof value, "%s", each + strlen(name) + 1);
    return value;
}

int main(int count, char *arguments[]) {
    char *options = "", url[4096], ports[2][16];
    for (int i = 3; i + 1 < count; i++)
        if (!strcmp(arguments[i], "-o")) options = arguments[i + 1];
    char *path = count > 2 ? strchr(arguments[1], ':') : NULL;
    if (path == NULL) {
        fprintf(stderr, "usage: mount.nfs SERVER:/PATH DIRECTORY [-o OPTION,...]\n");
        return 1;
    }
    snprintf(ports[0], sizeof ports[0], "%s", option(options, "port"));
    snprintf(ports[1], sizeof ports[1], "%s", option(options, "mountport"));
    snprintf(url, sizeof url, "nfs://%.*s%s?version=3&dircache=0&autoreconnect=-1&nfsport=%s&mountport=%s",
             (int)(path - arguments[1]), arguments[1], path + 1, ports[0], ports[1]);
    nfs = nfs_init_context();
    struct nfs_url *parsed = nfs_parse_url_dir(nfs, url);
    if (parsed == NULL || nfs_mount(nfs, parsed->server, parsed->path) < 0) {
        fprintf(stderr, "mount.nfs: %s: %s\n", arguments[1], nfs_get_error(nfs));
        return MOUNT_FAILED;
    }
    char name[4096];
    snprintf(name, sizeof name, "allow_other,subtype=nfs,fsname=%s", arguments[1]);
    char *fuse[] = {"mount.nfs", "-s", "-o", name, arguments[2], NULL};
    return fuse_main(5, fuse, &operations, NULL) ? MOUNT_FAILED : 0;
}
