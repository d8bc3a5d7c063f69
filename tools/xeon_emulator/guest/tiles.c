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
 * deny=1 loads 1, 3 and 4 but refuses the permission, as a seccomp filter or an old kernel would.
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
#define AREA_BYTES 12288   /* XSAVE, standard format: 2816 + 8192 on this CPU; checked at load */
#define AREAS 64
#define GET_SUPPORTED 0x1021
#define GET_PERMITTED 0x1022
#define REQUEST 0x1023

static bool deny;
module_param(deny, bool, 0444);

static struct {
	struct task_struct *owner;
	u8 *area;
} saved[AREAS];
static u8 *memory, *cleared;

static inline u64 in_use(void)
{
	u32 lo, hi;

	asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(1));
	return lo & TILE_BITS;
}

static inline void save_tiles(u8 *area)
{
	asm volatile("xsave64 (%0)" : : "r"(area), "a"(TILE_BITS), "d"(0) : "memory");
}

static inline void load_tiles(u8 *area)
{
	asm volatile("xrstor64 (%0)" : : "r"(area), "a"(TILE_BITS), "d"(0) : "memory");
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
		load_tiles(cleared);
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

	cpuid_count(0xd, 18, &size, &offset, &unused, &unused);
	if (size + offset > AREA_BYTES)
		return -EINVAL;
	memory = vzalloc((AREAS + 1) * AREA_BYTES); /* page aligned, so every area is aligned to 64 */
	if (!memory)
		return -ENOMEM;
	cleared = memory + AREAS * AREA_BYTES;
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
