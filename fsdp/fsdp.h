// Everything a training program needs.
#pragma once

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/mesh/launch.h"
#include "fsdp/mesh/run_ranks.h"
#include "fsdp/mesh/world.h"
#include "fsdp/module/call.h"
#include "fsdp/module/context.h"
#include "fsdp/module/hooked.h"
#include "fsdp/module/linear.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/clip_grad_norm.h"
#include "fsdp/optim/schedule.h"
#include "fsdp/optim/sgd.h"
