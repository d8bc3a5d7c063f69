// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * AMX for a Linux that found no XFD (as in Bochs 3.0) and so left the tile state off.
 *
 * 1. XCR0: sets the bits of XTILECFG and XTILEDATA; user space can use tiles from then on.
 * 2. arch_prctl: requests for permission succeed, queries report the tile bits.
 * 3. Context switches: the kernel does not save tiles, because it does not know that they are on; a hook at
 *    sched_switch does.
 * 4. /proc/cpuinfo: shows amx_tile, amx_bf16 and amx_int8, which had to be cleared for the boot.
 *
 * deny=1, at load or later through sysfs, keeps 1, 3 and 4 but refuses the permission, as a seccomp filter or an old
 * kernel would.
 */
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/tracepoint.h>
#include <linux/uaccess.h>
#include <linux/vmalloc.h>
#include <asm/cpufeature.h>
#include <asm/processor.h>

#define TILE_BITS 0x60000u /* XTILECFG (17) and XTILEDATA (18) */
#define CONFIG_BIT 0x20000u
#define TILES 8
#define TILE_BYTES 1024
#define CONFIG_AT 2752     /* of XTILECFG in the standard XSAVE format; checked at load */
#define DATA_AT 4096
#define AREA_BYTES (DATA_AT + TILES * TILE_BYTES)
#define AREAS 64
#define GET_SUPPORTED 0x1021
#define GET_PERMITTED 0x1022
#define REQUEST 0x1023

static bool deny;
module_param(deny, bool, 0644);

static struct {
	struct task_struct *owner;
	u8 *area;
} saved[AREAS];
static u8 *memory;

/*
 * Bochs 3.0 exchanges rows and bytes per row in what XSAVE writes of a configuration (and so loses it in XRSTOR), reports
 * XTILEDATA in use the wrong way round, and has no STTILECFG: so the configuration is saved by XSAVE, put right and
 * loaded by LDTILECFG, tiles by their own instructions.
 */
static inline bool in_use(void)
{
	u32 lo, hi;

	asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(1));
	return lo & CONFIG_BIT;
}

#define FOR_EACH_TILE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
/* Bytes 16 + 2 i of a configuration: bytes per row of tile i; 48 + i: its rows. A tile without rows has no contents. */
#define STORE_TILE(i)                                                                                   \
	if (config[48 + i])                                                                             \
		asm volatile("tilestored %%tmm" #i ", (%0,%1,1)"                                        \
			     : : "r"(area + DATA_AT + i * TILE_BYTES), "r"(64L) : "memory");
#define LOAD_TILE(i)                                                                                    \
	if (config[48 + i])                                                                             \
		asm volatile("tileloadd (%0,%1,1), %%tmm" #i                                            \
			     : : "r"(area + DATA_AT + i * TILE_BYTES), "r"(64L) : "memory");

static void save_tiles(u8 *area)
{
	u8 *config = area + CONFIG_AT;
	bool exchanged = false;
	int i;

	asm volatile("xsave64 (%0)" : : "r"(area), "a"(CONFIG_BIT), "d"(0) : "memory");
	for (i = 0; i < TILES; i++)
		exchanged |= config[48 + i] > 16; /* no tile has more rows */
	for (i = 0; exchanged && i < TILES; i++)
		swap(config[16 + 2 * i], config[48 + i]);
	FOR_EACH_TILE(STORE_TILE)
}

static void load_tiles(const u8 *area)
{
	const u8 *config = area + CONFIG_AT;

	asm volatile("ldtilecfg (%0)" : : "r"(config) : "memory");
	FOR_EACH_TILE(LOAD_TILE)
}

static inline void release_tiles(void)
{
	asm volatile("tilerelease");
}

static int slot_of(struct task_struct *task)
{
	int i;

	for (i = 0; i < AREAS; i++)
		if (saved[i].owner == task)
			return i;
	return -1;
}

static void on_switch(void *data, bool preempt, struct task_struct *prev, struct task_struct *next,
		      unsigned int prev_state)
{
	int i = slot_of(prev);
	bool used = in_use();

	if (used && !(prev_state & TASK_DEAD)) {
		if (i < 0)
			i = slot_of(NULL);
		if (WARN_ONCE(i < 0, "tiles: more than %d threads use tiles", AREAS))
			return;
		saved[i].owner = prev;
		save_tiles(saved[i].area);
	} else if (i >= 0) {
		saved[i].owner = NULL;
	}
	i = slot_of(next);
	if (i >= 0)
		load_tiles(saved[i].area);
	else if (used)
		release_tiles();
}

struct request {
	unsigned long option, argument;
};

static int on_enter(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct request *request = (struct request *)instance->data;
	const struct pt_regs *user = (const struct pt_regs *)regs->di;

	request->option = user->di;
	request->argument = user->si;
	return 0;
}

static int on_return(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct request *request = (struct request *)instance->data;
	u64 features = 0xe7 | TILE_BITS;

	if (deny)
		return 0;
	if (request->option == REQUEST && request->argument == 18)
		regs->ax = 0;
	else if (request->option == GET_SUPPORTED || request->option == GET_PERMITTED)
		regs->ax = copy_to_user_nofault((void __user *)request->argument, &features, sizeof(features));
	return 0;
}

static struct kretprobe arch_prctl_probe = {
	.kp.symbol_name = "__x64_sys_arch_prctl",
	.entry_handler = on_enter,
	.handler = on_return,
	.data_size = sizeof(struct request),
	.maxactive = 16,
};

static struct tracepoint *sched_switch_point;

static void find_sched_switch(struct tracepoint *point, void *unused)
{
	if (!strcmp(point->name, "sched_switch"))
		sched_switch_point = point;
}

static int __init tiles_init(void)
{
	u32 size, offset, lo, hi, unused;
	int i, error;

	asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
	lo |= TILE_BITS;
	asm volatile("xsetbv" : : "a"(lo), "d"(hi), "c"(0));

	cpuid_count(0xd, 17, &size, &offset, &unused, &unused);
	if (size != 64 || offset != CONFIG_AT)
		return -EINVAL;
	memory = vzalloc(AREAS * AREA_BYTES); /* page aligned, so every area is aligned to 64 */
	if (!memory)
		return -ENOMEM;
	for (i = 0; i < AREAS; i++)
		saved[i].area = memory + i * AREA_BYTES;

	for_each_kernel_tracepoint(find_sched_switch, NULL);
	if (!sched_switch_point)
		return -ENOENT;
	error = tracepoint_probe_register(sched_switch_point, on_switch, NULL);
	if (!error)
		error = register_kretprobe(&arch_prctl_probe);
	if (error)
		return error;

	set_cpu_cap(&cpu_data(0), X86_FEATURE_AMX_TILE);
	set_cpu_cap(&cpu_data(0), X86_FEATURE_AMX_BF16);
	set_cpu_cap(&cpu_data(0), X86_FEATURE_AMX_INT8);
	return 0;
}

module_init(tiles_init);
MODULE_DESCRIPTION("AMX on an emulator without XFD");
MODULE_LICENSE("Dual BSD/GPL");
