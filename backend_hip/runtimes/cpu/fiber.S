/* The fiber switch: saves what the calling convention says a call preserves, swaps stacks, restores.
 * void assay_fiber_switch(void** save, void* load);   [[noreturn]] void assay_fiber_resume(void* load);
 * A jump instead of `ret`: return-address prediction assumes one stack and would miss at every switch.
 * MXCSR and FPCR are not saved: a launch sets them once and kernels can't change them. */
#if defined(__x86_64__)
    .text
    .globl assay_fiber_switch
    .hidden assay_fiber_switch
    .type assay_fiber_switch, @function
    .p2align 4
assay_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size assay_fiber_switch, .-assay_fiber_switch

    .globl assay_fiber_resume
    .hidden assay_fiber_resume
    .type assay_fiber_resume, @function
    .p2align 4
assay_fiber_resume:
    movq %rdi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size assay_fiber_resume, .-assay_fiber_resume
#elif defined(__aarch64__)
    .text
    .globl assay_fiber_switch
    .hidden assay_fiber_switch
    .type assay_fiber_switch, %function
    .p2align 4
assay_fiber_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov x0, x1
    .globl assay_fiber_resume
    .hidden assay_fiber_resume
    .type assay_fiber_resume, %function
assay_fiber_resume:
    mov sp, x0
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    br x30
    .size assay_fiber_switch, .-assay_fiber_switch
#else
#error "the CPU runtime has fibers for x86-64 and aarch64 only"
#endif
    .section .note.GNU-stack,"",%progbits
